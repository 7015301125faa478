"""How a worker batches, loads, saves and evicts. Pure data, from the configuration to the step loop."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from kvtier.tier.policy.base import PolicySettings, ScoreWeights
from kvtier.tier.protocol.messages import WriteMode
from kvtier.workers.scheduling.scheduler import PREEMPTION


@dataclass(frozen=True)
class EngineSettings:
    """`policy` chooses what leaves L1; `shares` are the most of it that a tenant's pages may take, by its name.

    `preemption` has the weights of a running sequence's score. `write`: full pages are copied down at once, or, with
    "demote", when they must leave. `role` is told to the gateway; any worker does what it is sent. `l2_share` of L1 at
    most is lent to the node's other workers while it is idle; above 0 theirs is used, too.
    """

    max_batch_tokens: int = 2048  # computed in one step
    max_sequences: int = 64  # running at once
    max_waiting: int = 1024  # requests queued
    always_load: bool = False  # a page is loaded even where computing it is quicker
    load_deadline_ms: float = 2000.0  # then a load loses to computing
    copy_threads: int = 2
    policy: PolicySettings = PolicySettings()  # noqa: RUF009  frozen
    write: WriteMode = "through"
    shares: Mapping[str, float] = field(default_factory=dict)
    preemption: ScoreWeights = PREEMPTION
    role: Literal["both", "prefill", "decode"] = "both"
    l2_share: float = 0.0
