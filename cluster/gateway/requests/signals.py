"""Reads what a request tells of its session, and of what will follow: the cache goes by it. Changes no token."""

from __future__ import annotations

from dataclasses import dataclass

from kvtier.cluster.config.deployment import MAX_STREAM_TOKENS
from kvtier.cluster.gateway.requests.reading import MAX_ID_CHARS, invalid, quoted
from kvtier.proto import inference_pb2
from kvtier.tier.pages.identity import session_number


@dataclass(frozen=True, slots=True)
class Signals:
    """A request's signals as workers take them (EngineRequest says what each means)."""

    session: int
    session_closed: bool
    session_open: bool
    turn: int
    expected_output_tokens: int


def signals(message: inference_pb2.GenerateRequest, salt: bytes) -> Signals:
    """`salt` is the tenant's: a session of the same name of another tenant is another session. Raises Refusal."""
    _check_session(message)
    _check_expected(message.expected_output_tokens)
    return Signals(
        session=session_number(salt, message.session_id) if message.session_id else 0,
        session_closed=message.session_state == inference_pb2.SESSION_STATE_CLOSED,
        session_open=message.session_state == inference_pb2.SESSION_STATE_OPEN,
        turn=_turn(message),
        expected_output_tokens=message.expected_output_tokens,
    )


def _check_session(message: inference_pb2.GenerateRequest) -> None:
    session_id, state = message.session_id, message.session_state
    if len(session_id) > MAX_ID_CHARS:
        raise invalid(
            f"session_id must be at most {MAX_ID_CHARS} characters, got {len(session_id)}: {quoted(session_id)}"
        )
    known = state in (inference_pb2.SESSION_STATE_OPEN, inference_pb2.SESSION_STATE_CLOSED)
    if known and not session_id:
        name = inference_pb2.SessionState.Name(state)
        raise invalid(f"session_state {name} needs the session that it is of: set session_id too")


def _check_expected(tokens: int) -> None:
    if not 0 <= tokens <= MAX_STREAM_TOKENS:
        raise invalid(
            f"expected_output_tokens must be from 0 (no guess) to {MAX_STREAM_TOKENS}, got {tokens}"
        )


def _turn(message: inference_pb2.GenerateRequest) -> int:
    """Of a chat: the answers it holds, and the one asked for; 0: not told."""
    if message.WhichOneof("prompt") != "chat":
        return 0
    return 1 + sum(each.role == "assistant" for each in message.chat.messages)
