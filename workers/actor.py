"""The Ray actor around a decode worker: loads the model, carries outputs to the gateway. Holds no logic of its own."""

from __future__ import annotations

import gc
import logging
import os
import threading
import uuid
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import ray
from ray.exceptions import RayError

from kvtier.tier.pages.identity import tenant_salt
from kvtier.tier.pages.page import TierName
from kvtier.tier.protocol.key_query import HeldKeys, keys_with, split_keys
from kvtier.tier.protocol.kv_events import Batch, Feed, Reply, Source
from kvtier.tier.protocol.results import Cleared, ManyOutcomes
from kvtier.tier.stats import Snapshot
from kvtier.tier.stores.base import Outcome, PageInfo
from kvtier.workers.engine.kv_publisher import Holds, Outlet, Publisher, PublishError
from kvtier.workers.engine.outputs import OutputSender
from kvtier.workers.machine.limits import cores_here
from kvtier.workers.requests.api import (
    EngineRequest,
    Explanation,
    Output,
    QueueFull,
    WorkerInfo,
    WorkerStopped,
)
from kvtier.workers.scheduling.settings import EngineSettings

if TYPE_CHECKING:
    from kvtier.workers.engine.worker import DecodeWorker
    from kvtier.workers.parallel.leader import GroupRunner

log = logging.getLogger(__name__)

CALLS_AT_ONCE = 16  # threads of the actor; they only wait for the step loop
# A thread of its own: however many calls wait for a step loop that is stalled, the question whether it does is answered.
PULSE_GROUP = "heartbeat"
END_S = (
    5.0  # for a worker that failed to let go of what it holds, and for the last words where its group broke
)
PUBLISH_S = 2.0  # the directory answers in milliseconds; later it is asked again
# Threads of a finished parallel region sleep rather than spin: the copy threads need the cores.
ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}


class Outbox:
    """Where the step loop's outputs go: the gateway's connection, once there is one.

    A connection that ends takes all requests along, and so does a new one, since it is another gateway's: nothing reads
    what they give.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # guards _sender: set by an actor thread, used by the step loop
        self._sender: OutputSender | None = None
        self._worker: DecodeWorker | None = None

    def connect(self, worker: DecodeWorker, sender: OutputSender) -> None:
        """From now on outputs go there. What was submitted before is cancelled."""
        with self._lock:
            old, self._sender, self._worker = self._sender, sender, worker
        worker.cancel_all()
        if old is not None:
            old.close()
        watch = threading.Thread(target=self._watch, args=(worker, sender), name="gateway-watch", daemon=True)
        watch.start()

    def _watch(self, worker: DecodeWorker, sender: OutputSender) -> None:
        sender.wait_closed()
        if self.close(sender):
            log.error("the gateway's connection ended: its requests are cancelled")
            worker.cancel_all()

    def __call__(self, outputs: list[Output]) -> None:
        """Send one step's outputs."""
        with self._lock:
            sender = self._sender
        if sender is not None:
            try:
                sender.send(outputs)
                return
            except OSError as error:
                if self.close(sender) and self._worker is not None:
                    log.error("the gateway takes no outputs any more, its requests are cancelled: %s", error)
                    self._worker.cancel_all()
        for request_id in {output.request_id for output in outputs if output.finish_reason is None}:
            if self._worker is not None:
                self._worker.cancel(request_id)

    def close(self, sender: OutputSender | None = None) -> bool:
        """Let the connection go, if it is (still) this one; whether it was."""
        with self._lock:
            old = self._sender
            if old is None or (sender is not None and old is not sender):
                return False
            self._sender = None
        old.close()
        return True


class DecodeWorkerProcess:
    """What the actor's process runs; `DecodeWorkerActor` is this class as a Ray actor.

    `tenants` maps names to the salts of the configuration. `threads` 0: the physical cores. The formats and the window are
    those of load_runner. With `tensor_parallel` above 1 so many ranks, this process and its children, share the worker's threads
    and serve as one; `l1_bytes` are those of each.
    """

    def __init__(
        self,
        *,
        worker_id: str,
        node_id: str,
        socket_path: str | None,
        model_path: str,
        tenants: dict[str, str],
        engine: EngineSettings,
        dtype: str,
        page_tokens: int,
        l1_bytes: int,
        numerics: str = "auto",
        forward: str = "auto",
        threads: int = 0,
        max_context: int = 0,
        epoch: int = 0,
        cache_format: str = "auto",
        recent_tokens: int = 1024,
        decay_sinks: int = 16,
        l4_format: str = "",
        window: int = 0,
        sinks: int = 0,
        tensor_parallel: int = 1,
        cuda_graphs: bool = False,
    ) -> None:
        # Here and not above: a holder of a handle of this actor imports this module, and needs no torch.
        from kvtier.kernels.memory import raise_malloc_thresholds
        from kvtier.workers.engine.worker import DecodeWorker
        from kvtier.workers.parallel.leader import GroupRunner, load_group
        from kvtier.workers.runner.runner import load_runner

        raise_malloc_thresholds()
        is_group = tensor_parallel > 1
        threads = threads or cores_here()
        runner = (partial(load_group, tensor_parallel=tensor_parallel) if is_group else load_runner)(
            model_path,
            dtype=dtype,
            page_tokens=page_tokens,
            l1_bytes=l1_bytes,
            numerics=numerics,
            forward=forward,
            threads=max(1, threads // tensor_parallel),
            max_context=max_context,
            max_batch_tokens=engine.max_batch_tokens,
            epoch=epoch,
            cache_format=cache_format,
            recent_tokens=recent_tokens,
            decay_sinks=decay_sinks,
            l4_format=l4_format,
            window=window,
            sinks=sinks,
            share_arena=engine.l2_share > 0,
            cuda_graphs=cuda_graphs,
        )
        self._outbox = Outbox()
        self._outlet = Outlet()
        self._worker = DecodeWorker(
            runner,
            engine,
            worker_id=worker_id,
            node_id=node_id,
            socket_path=socket_path,
            tenants={name: tenant_salt(name, salt) for name, salt in tenants.items()},
            sink=self._outbox,
            tokenizer_digest=runner.tokenizer_digest,
        )
        self._runner = runner
        self._worker.start()
        threading.Thread(target=self._end_with_loop, name="loop-watch", daemon=True).start()
        if isinstance(runner, GroupRunner):
            threading.Thread(target=self._end_with, args=(runner,), name="group-watch", daemon=True).start()
        gc.collect()
        gc.freeze()  # what was loaded stays: collections in the middle of a step need not look at it

    def _end_with_loop(self) -> None:
        """A step loop that failed never runs again: end the process, so that it is restarted."""
        why = self._worker.wait_failed(END_S)
        if why is not None:
            log.error("the worker ends, since its step loop failed: %s", why)
            os._exit(1)

    def _end_with(self, group: GroupRunner) -> None:
        """A group that broke is never mended: end the process, so that it is restarted as a whole."""
        why = group.wait_broken()
        if why is None:
            return
        log.error("the worker ends with its ranks: %s", why)
        stopping = threading.Thread(target=self._worker.stop, name="group-end", daemon=True)
        stopping.start()
        stopping.join(END_S)  # requests are told so; a step loop that waits for its GPU is not waited for
        os._exit(1)

    def connect_gateway(self, address: str, secret: bytes) -> None:
        """Send all outputs to the gateway at HOST:PORT from now on; cancels what was asked for before. Raises OSError."""
        sender = OutputSender.connect(address, secret, self._worker.worker_id)
        self._outbox.connect(self._worker, sender)

    def connect_directory(self, directory: Any, address: str) -> None:
        """Tell the directory, a handle of its actor, what L1 holds from now on. `address` is that of the node's exchange."""
        worker = self._worker
        source = Source(
            f"worker:{worker.worker_id}", uuid.uuid4().hex, worker.node_id, worker.worker_id, address
        )
        worker.follow_holds(lambda came, left: self._outlet(TierName.HBM, came, left))
        feed = Feed(source, (TierName.HBM,))
        self._outlet.connect(Publisher(feed, sender_to(directory), self._held, worker.worker_id))

    def _held(self) -> Holds:
        try:
            return {TierName.HBM: self._worker.holds()}
        except (WorkerStopped, QueueFull, TimeoutError) as error:
            raise PublishError(str(error) or "the worker doesn't say what it holds") from error

    def submit(self, request: EngineRequest) -> None:
        """See DecodeWorker.submit."""
        self._worker.submit(request)

    def cancel(self, request_id: str, is_stopped: bool = False) -> None:
        """See DecodeWorker.cancel."""
        self._worker.cancel(request_id, is_stopped=is_stopped)

    def info(self) -> WorkerInfo:
        """What this worker serves."""
        return self._worker.info()

    def health(self) -> str | None:
        """None when the worker is well, else what is wrong."""
        if self._worker.is_healthy():
            return None
        return self._worker.error or "the step loop has ended"

    @ray.method(concurrency_group=PULSE_GROUP)
    def heartbeat(self) -> float:
        """See DecodeWorker.heartbeat."""
        return self._worker.heartbeat()

    def stats(self) -> Snapshot:
        """This worker's counters."""
        return self._worker.stats()

    def explain(self, request_id: str) -> Explanation | None:
        """Where a request's prompt was found; None when it isn't remembered."""
        return self._worker.explain(request_id)

    def pages(
        self, tenant: str | None = None, tier: TierName | None = None, limit: int = 1000
    ) -> list[PageInfo]:
        """Cached pages in L1."""
        return self._worker.pages(tenant, tier, limit)

    def pages_of(self, keys: list[bytes]) -> list[PageInfo]:
        """Pages in L1 by their keys."""
        return self._worker.pages_of(keys)

    def held(self, keys: bytes) -> list[HeldKeys]:
        """Which of these keys, one behind the other, L1 has."""
        return self._worker.held(split_keys(keys))

    def keys_with(self, heads: list[str], limit: int) -> list[list[bytes]]:
        """See by_key.keys_with: of the pages in L1. The step loop only copies the keys."""
        return keys_with(self._worker.holds(), heads, limit)

    def pin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Keep pages in L1."""
        return self._worker.pin(keys)

    def unpin(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Undo `pin`."""
        return self._worker.unpin(keys)

    def evict(self, keys: list[bytes], tier: TierName | None = None) -> list[tuple[bytes, Outcome]]:
        """Drop pages from L1; all are MISSING for another tier."""
        if tier not in (None, TierName.HBM):
            return [(key, Outcome.MISSING) for key in keys]
        return self._worker.evict(keys)

    def evict_all(self, tier: TierName | None = None) -> ManyOutcomes:
        """Drop all pages from L1; there are none in another tier."""
        return ManyOutcomes.of(self._worker.evict(None) if tier in (None, TierName.HBM) else [])

    def clear(self, tenant: str | None = None, number: int = 0) -> Cleared:
        """Drop a tenant's pages from L1, or all tenants'."""
        return Cleared(ManyOutcomes.of(self._worker.clear(tenant, number)))

    def know(self, told: list[tuple[bytes, int]]) -> None:
        """See DecodeWorker.know."""
        self._worker.know(told)

    def verify(self, keys: list[bytes]) -> list[tuple[bytes, Outcome]]:
        """Check pages in L1 against their checksums."""
        return self._worker.verify(keys)

    def verify_all(self) -> ManyOutcomes:
        """The same with all pages in L1."""
        return ManyOutcomes.of(self._worker.verify(None))

    def idle(self) -> bool:
        """No request, no copy, nothing left to save."""
        return self._worker.idle()

    def check(self) -> None:
        """Re-derive all counts; AssertionError where one differs."""
        self._worker.check()

    def stop(self, drain_s: float = 0.0) -> None:
        """Cancel what runs, save what is unsaved for at most `drain_s`, and let everything go."""
        self._outlet.close()
        self._worker.stop(drain_s)
        self._outbox.close()
        self._runner.close()


def sender_to(directory: Any) -> Callable[[Batch], Reply]:
    """What gives batches to the directory, a handle of its actor. Raises PublishError when it doesn't answer in time.

    A call that is late goes on; while it does no other is made, so that none pile up at a directory that is stalled.
    """
    late: list[Any] = []

    def send(batch: Batch) -> Reply:
        if late and not ray.wait(late, timeout=PUBLISH_S)[0]:
            raise PublishError("the directory hasn't answered the last batch yet")
        late[:] = [directory.publish.remote(batch)]
        try:
            reply: Reply = ray.get(late[0], timeout=PUBLISH_S)
            late.clear()
        except RayError as error:
            raise PublishError(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}") from error
        return reply

    return send


DecodeWorkerActor = ray.remote(  # type: ignore[call-overload]  # Ray's types lack max_concurrency
    num_cpus=0,
    max_concurrency=CALLS_AT_ONCE,
    concurrency_groups={PULSE_GROUP: 1},
    runtime_env={"env_vars": ENVIRONMENT},
)(DecodeWorkerProcess)
