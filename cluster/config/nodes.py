"""The sections of the configuration that make many workers and nodes of one: who runs where, and how they help each other. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from ipaddress import ip_network
from itertools import cycle, islice
from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from kvtier.cluster.config.values import Bytes, Section
from kvtier.workers.machine.endpoints import Endpoint, bare_host

Role = Literal["both", "prefill", "decode"]
_ROLES = get_args(Role)
HASTY_S = 30.0  # a worker's longest step may take so long, on a slow CPU or with a large batch
MAX_DEADLINE_MS = 600_000.0  # of waiting for a page; no request outlasts a longer one


class RequestWeights(Section):
    """Of the terms of a running request's score, each term from 0 to 1; what scores lowest makes room first."""

    recency: float = Field(default=0.2, ge=-1, le=1)  # got a token a short time ago
    memory: float = Field(default=-0.2, ge=-1, le=1)  # has many pages
    remaining: float = Field(default=-0.6, ge=-1, le=1)  # expects many tokens yet

    @model_validator(mode="after")
    def _some_term_counts(self) -> Self:
        check_weights(self.recency, self.memory, self.remaining)
        return self


def check_weights(recency: float, memory: float, remaining: float) -> None:
    """Raises ValueError where no term counts."""
    if recency == memory == remaining == 0:
        raise ValueError("one of recency, memory and remaining must not be 0, got three zeros")


class WorkerConfig(Section):
    """The decode workers of a node."""

    count: int = Field(default=1, ge=1, le=64)  # of each node; each has its own L1 and its own weights
    # What each does, one for all or a list that is gone through again and again, node by node. prefill: computes prompts
    # and hands them on; decode: goes on from there; both: whole requests.
    role: Role | tuple[Role, ...] = "both"
    tensor_parallel: int = Field(default=1, ge=1, le=64)  # ranks that share one worker's weights and pages
    gpus: Literal["auto"] | float = "auto"  # of each rank; auto: 1 where nodes have GPUs, else 0
    cuda_graphs: bool = (
        False  # replay decode steps as CUDA graphs: fewer launches, some memory for each batch size
    )
    threads: int = Field(default=0, ge=0)  # 0: the physical cores within the CPU quota, shared out
    max_batch_tokens: int = Field(
        default=2048, ge=16
    )  # of one step: more is faster prefill, less is smoother decode
    max_sequences: int = Field(default=64, ge=1, le=65536)  # running at once
    max_waiting: int = Field(
        default=1024, ge=1
    )  # requests in the queue; more are refused with RESOURCE_EXHAUSTED
    preemption: RequestWeights = RequestWeights()  # of the score by which a running request makes room

    @field_validator("role", mode="before")
    @classmethod
    def _all_of_a_request_is_done(cls, value: Any) -> Any:
        there = list(value) if isinstance(value, list | tuple) else [value]
        if not there or not all(role in _ROLES for role in there):
            raise ValueError(f"must be both, prefill or decode, or a list of them, got {value!r}")
        if "both" not in there and (missing := {"prefill", "decode"} - set(there)):
            raise ValueError(
                f"with workers that only {there[0]} no worker would {missing.pop()}: "
                "use both, or a list such as [prefill, decode]"
            )
        return value

    @field_validator("gpus", mode="before")
    @classmethod
    def _gpus_can_be_given(cls, value: Any) -> Any:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if value == "auto" or (is_number and (0 <= value <= 1 or (value > 0 and float(value).is_integer()))):
            return value
        raise ValueError(f"must be auto, a share of one GPU from 0 to 1, or a whole number, got {value!r}")

    @model_validator(mode="after")
    def _roles_have_workers(self) -> Self:
        if self.gpus != "auto" and 0 < self.gpus < 1 < self.tensor_parallel:
            raise ValueError(
                f"tensor_parallel {self.tensor_parallel} needs a GPU for each rank, got gpus {self.gpus:g}"
            )
        return self

    def roles(self, workers: int) -> tuple[Role, ...]:
        """What each of so many workers of the deployment does."""
        one_by_one: Iterable[Role] = (self.role,) if isinstance(self.role, str) else self.role
        return tuple(islice(cycle(one_by_one), workers))


class NodesConfig(Section):
    """The machines of the deployment."""

    count: int = Field(default=1, ge=0, le=10_000)  # 0: every node of the Ray cluster that fits


class RayConfig(Section):
    """The Ray cluster: one that `kvtier up` starts and stops, or one that runs."""

    address: str = (
        "local"  # local: start one here; auto: join the one that runs here; HOST:PORT: join that one
    )
    raylets: int = Field(
        default=1, ge=1, le=16
    )  # of a local one: so many nodes on this machine, to try it out

    @field_validator("address")
    @classmethod
    def _address_can_be_reached(cls, value: str) -> str:
        if value in ("local", "auto"):
            return value
        try:
            where = Endpoint.parse(value)
        except ValueError as error:
            raise ValueError(f"must be local, auto or HOST:PORT, got {value!r}") from error
        if not where.port:
            raise ValueError(f"must be local, auto or HOST:PORT with a port above 0, got {value!r}")
        return str(where)

    @property
    def is_ours(self) -> bool:
        """Whether this deployment starts and stops Ray."""
        return self.address == "local"


class TransferTls(Section):
    """PEM files, found at these paths on each machine: TLS between its nodes, both sides showing a certificate."""

    cert: str = Field(
        min_length=1
    )  # of the machine: it names the host or address by which the others reach it
    key: str = Field(min_length=1)  # of that certificate
    ca: str = Field(
        min_length=1
    )  # who signed all of them; a node that shows another's certificate gets no page


class TransferConfig(Section):
    """How pages travel from node to node: each has an exchange that serves its own and fetches others'."""

    # Where exchanges listen. "": the address by which Ray knows their node; a network such as 10.1.0.0/16: each node's own
    # address in it; 0.0.0.0: at all of them.
    host: str = ""
    port: int = Field(default=0, ge=0, le=65535)  # 0: any free port
    in_flight_bytes: Bytes = Field(default=64 * 2**20, ge=2**20)  # of each exchange, both ways together
    # A page that takes longer is computed.
    deadline_ms: float = Field(default=5000.0, gt=0, le=MAX_DEADLINE_MS)
    streams: int = Field(default=2, ge=1, le=16)  # at once between two nodes
    same_host: Literal["auto", "off"] = "auto"  # auto: nodes on one machine copy pages in memory
    tls: TransferTls | None = (
        None  # None: pages, and the secret that nodes know each other by, are sent in clear
    )

    @field_validator("host")
    @classmethod
    def _network_is_one(cls, value: str) -> str:
        if "/" not in value:
            return bare_host(value) if value else ""
        try:
            ip_network(value)
        except ValueError as error:
            raise ValueError(f"must be a network such as 10.1.0.0/16, got {value!r} ({error})") from error
        return value

    @field_validator("same_host", mode="before")
    @classmethod
    def _off_is_a_word(cls, value: Any) -> Any:
        return "off" if value is False else value  # as YAML reads it


class ClusterConfig(Section):
    """When a part of the deployment is given up."""

    # Seconds in which a part's loop doesn't turn although its process lives: then it is killed and restarted. More bears
    # longer stops, such as those of a machine that swaps; less keeps requests waiting for less long. It must exceed the
    # longest step that a worker has, or that is killed in the midst of it: worker.max_batch_tokens over the speed of
    # prefill at the longest context, on a CPU many seconds.
    stalled_after_s: float = Field(default=60.0, ge=5, le=86_400)

    @property
    def caution(self) -> str | None:
        """What an operator should know of these values, in a line."""
        if self.stalled_after_s >= HASTY_S:
            return None
        return (
            f"cluster.stalled_after_s {self.stalled_after_s:g} is below {HASTY_S:g}: a worker is killed when one step, "
            "such as the prefill of worker.max_batch_tokens tokens, takes longer"
        )


class RoutingConfig(Section):
    """Which worker a request goes to."""

    policy: Literal["prefix", "least_loaded", "round_robin"] = "prefix"


def check_nodes(nodes: NodesConfig, ray: RayConfig, worker: WorkerConfig, transfer: TransferConfig) -> None:
    """Raises ValueError for a number of nodes that can't be had, with the way out."""
    if not ray.is_ours and ray.raylets > 1:
        raise ValueError(
            f"ray.raylets {ray.raylets} are for a Ray cluster that kvtier starts, and ray.address {ray.address} joins "
            "one that runs: leave ray.raylets at 1, or ray.address at local"
        )
    if ray.is_ours and nodes.count > ray.raylets:
        raise ValueError(
            f"nodes.count {nodes.count} is more than the {ray.raylets} that ray.address local has: set ray.raylets "
            f"{nodes.count} to try it on this machine, or join a Ray cluster with ray.address HOST:PORT"
        )
    if transfer.port and ray.raylets > 1:
        raise ValueError(
            f"transfer.port {transfer.port} can't be taken by {ray.raylets} nodes of one machine (ray.raylets): use 0"
        )
    total = (nodes.count or ray.raylets) * worker.count
    if ray.is_ours and "both" not in (done := worker.roles(total)) and set(done) != {"prefill", "decode"}:
        raise ValueError(
            f"worker.role [{', '.join(worker.role)}] is cut short by {total} worker(s), which only {done[0]}: "
            f"set worker.count {len(worker.role)}, or worker.role both"
        )
