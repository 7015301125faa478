"""The coordinator of a node as something to record: which of its classes and words may be in a file. Pure."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any, get_args

import msgspec

from kvtier.tier.node.coordinator import Coordinator
from kvtier.tier.node.state.records import Request, Worker
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.events import Command, Event, FromWorker, Send
from kvtier.tier.record.checkpoint import State
from kvtier.tier.record.format import Alias, Machine, modules_of
from kvtier.tier.stats import Snapshot, to_json

MODULES = modules_of(Coordinator)
_REQUEST_NAMES = ("request_id", "hold_for")  # fields of messages that clients have a say in


def _hide(event: Event, alias: Alias) -> Event:
    return replace(event, message=_hidden(event.message, alias)) if isinstance(event, FromWorker) else event


def _hide_commands(commands: list[Command], alias: Alias) -> list[Command]:
    return [replace(c, message=_hidden(c.message, alias)) if isinstance(c, Send) else c for c in commands]


def _hidden(message: Any, alias: Alias) -> Any:
    """A message of either side with other names for requests, wherever it has any."""
    names = [name for name in _REQUEST_NAMES if getattr(message, name, None) is not None]
    if not names:
        return message
    hidden = {name: _hidden_id(getattr(message, name), alias) for name in names}
    return msgspec.structs.replace(message, **hidden)


def _hidden_id(name: str, alias: Alias) -> str:
    """Of a lease (request id, sequence, number) the request id alone, so that it still shows whose it is."""
    request_id, *numbers = name.rsplit(":", 2)
    if len(numbers) == 2 and all(number.isascii() and number.isdigit() for number in numbers):
        return ":".join((alias(request_id), *numbers))
    return alias(name)


def _hide_state(one: object, state: State, alias: Alias) -> State:
    if isinstance(one, Request):
        return {**state, "request_id": _hidden_id(one.request_id, alias)}
    if isinstance(one, Worker):
        requests = {_hidden_id(name, alias): request for name, request in one.requests.items()}
        return {**state, "requests": requests}
    return state


def _apply(node: Coordinator, event: Event, now: float) -> list[Command]:
    return node.handle(event, now)


def _counters(node: Coordinator) -> Snapshot:
    return node.snapshot()


NODE = Machine(
    name="cache node",
    events={kind.__name__: kind for kind in get_args(Event)},
    modules=MODULES,
    apply=_apply,
    counters=_counters,
    hide=_hide,
    hide_commands=_hide_commands,
    hide_state=_hide_state,
)


def about(node: Coordinator) -> dict[str, Any]:
    """What a recording's header says of its node: the sizes of its tiers, what they hold, and its bounds."""
    tiers = to_json(node.snapshot())["tiers"]
    return {
        "tiers": {name: tiers[name] for name in (TierName.HOST.value, TierName.SSD.value)},
        "limits": asdict(node.limits),
    }
