"""Makes the Ray actors of a deployment out of its configuration. Knows what each takes; starts and stops nothing else."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from kvtier.cluster.config.deployment import Config
from kvtier.cluster.config.nodes import TransferTls
from kvtier.cluster.config.policies import digest_shares, policy_settings, request_weights, tenant_shares
from kvtier.cluster.machines.homes import Home
from kvtier.cluster.machines.l4_folders import clears_folder, l4_root
from kvtier.cluster.machines.node_probe import NodeInfo
from kvtier.cluster.machines.placement import Place, Placement, here
from kvtier.cluster.machines.stored_pages import StoredPages
from kvtier.cluster.transfer.wire import TlsFiles
from kvtier.workers.scheduling.settings import EngineSettings

ALWAYS = -1  # Ray's max_restarts: start it again as often as it dies


class Actors:
    """Every call makes one actor and returns its handle. Holds what must be the same each time a part is restarted.

    Ray starts none again but the directory: a part that is restarted may have to be told of another machine.
    """

    def __init__(
        self,
        config: Config,
        model: Path,
        stored: StoredPages,
        placement: Placement,
        nodes: int,
        sockets: Path,
        cache: Path,
    ) -> None:
        """`cache` is the user's cache folder on this machine. `model` is this machine's folder of it; `nodes` how many there are; `sockets` a short folder, which is made where
        it isn't."""
        self._config = config
        self._model = model
        self._stored = stored
        self._placement = placement
        self._sockets = sockets
        self._cache = cache
        self._secret = secrets.token_hex(32)  # by which this deployment's exchanges know each other
        self._nodes: set[str] = set()  # ids of those that have been made
        self._roles = config.worker.roles(nodes * config.worker.count)

    def node(self, home: Home) -> Any:
        """A CacheNode. The first one of a node must be able to use its L4; one restarted goes on without."""
        from kvtier.cluster.node import CacheNode

        tiers, place = self._config.tiers, home.place
        is_first = place.node_id not in self._nodes
        self._nodes.add(place.node_id)
        return CacheNode.options(max_restarts=0, scheduling_strategy=self._placement.on(place)).remote(
            node_id=place.node_id,
            socket_path=self._socket(place),
            payload_bytes=self._stored.sizes[-1],
            l3_bytes=tiers.l3.bytes,
            l4_path=str(l4_root(tiers.l4.path, home.ground.cache, self._config.name)),
            l4_bytes=tiers.l4.bytes,
            l4_store=tiers.l4.store,
            min_payload_bytes=self._stored.sizes[0],
            l4_variants=self._stored.l4_variants,
            needs_l4=is_first,
            policy=policy_settings(self._config),
            write=tiers.write,
            shares=digest_shares(self._config),
            fetch_deadline_s=self._config.transfer.deadline_ms / 1e3,
            awaits_clears=True,
        )

    def worker(self, home: Home, number: int) -> Any:
        """A decode worker; `number` counts over the whole deployment."""
        from kvtier.workers.actor import DecodeWorkerActor

        config, place, ground = self._config, home.place, home.ground
        options: dict[str, Any] = {
            "max_restarts": 0,
            "scheduling_strategy": self._placement.on(place),
            "num_gpus": self._placement.gpus_per_rank * config.worker.tensor_parallel,
        }
        if config.ray.is_ours:
            # What its runtime_env sets is in our environment already; with one, Ray would start it a second later.
            options["runtime_env"] = {}
        return DecodeWorkerActor.options(**options).remote(
            worker_id=f"worker-{number}",
            node_id=place.node_id,
            socket_path=self._socket(place),
            model_path=str(ground.model),
            tenants={tenant.name: tenant.salt for tenant in config.tenants},
            dtype=config.model.dtype,
            page_tokens=config.page_tokens,
            l1_bytes=config.tiers.l1.bytes,
            numerics=config.numerics,
            forward=config.model.forward,
            threads=self.worker_threads(ground),
            max_context=config.model.max_context,
            epoch=config.cache.epoch,
            cache_format=config.cache.format,
            recent_tokens=config.cache.recent_tokens,
            decay_sinks=config.cache.sink_tokens,
            l4_format=config.tiers.l4.format,
            window=config.model.window,
            sinks=config.model.sinks,
            engine=self._engine(number),
            tensor_parallel=config.worker.tensor_parallel,
            cuda_graphs=config.worker.cuda_graphs,
        )

    def _engine(self, number: int) -> EngineSettings:
        config, worker = self._config, self._config.worker
        return EngineSettings(
            max_batch_tokens=worker.max_batch_tokens,
            max_sequences=worker.max_sequences,
            max_waiting=worker.max_waiting,
            always_load=config.cache.load == "always",
            load_deadline_ms=config.cache.load_deadline_ms,
            policy=policy_settings(config),
            write=config.tiers.write,
            shares=tenant_shares(config),
            preemption=request_weights(config),
            role=self._roles[number],
            l2_share=self._l2_share(),
        )

    def exchange(self, home: Home) -> Any:
        """What gives a node's pages to others, and gets theirs."""
        from kvtier.cluster.transfer.actor import PageExchange

        transfer, place = self._config.transfer, home.place
        return PageExchange.options(max_restarts=0, scheduling_strategy=self._placement.on(place)).remote(
            node_id=place.node_id,
            socket_path=self._socket(place),
            host=transfer.host or place.machine.address,
            port=transfer.port,
            secret=self._secret,
            in_flight_bytes=transfer.in_flight_bytes,
            deadline_s=transfer.deadline_ms / 1e3,
            streams=transfer.streams,
            same_host=transfer.same_host,
            tls=_files(transfer.tls),
        )

    def directory(self) -> Any:
        """The one directory, on this machine. Who has its handle need not hear when Ray starts it again."""
        from kvtier.cluster.directory.actor import Directory

        return Directory.options(max_restarts=ALWAYS, scheduling_strategy=here()).remote()

    def gateway(self, port: int) -> Any:
        """The one gateway, on this machine."""
        from kvtier.cluster.gateway.actor import Gateway

        config = self._config
        return Gateway.options(max_restarts=0, scheduling_strategy=here()).remote(
            str(self._model),
            config.model.name or Path(config.model.path).name,
            config.grpc.model_copy(update={"port": port}),
            config.tenants,
            config.worker.max_sequences + config.worker.max_waiting,
            config.model.window,
            config.model.sinks,
            config.routing.policy,
            len(self._roles),
            clears_folder=str(clears_folder(self._cache, config.name)),
            node_ids=sorted(self._nodes),
            sampling=config.model.sampling,
        )

    def worker_threads(self, ground: NodeInfo) -> int:
        """Threads of each worker: as configured, else the physical cores of its machine, shared out."""
        config = self._config
        on_one_machine = config.worker.count * config.ray.raylets
        return config.worker.threads or max(1, ground.cores // on_one_machine)

    def _l2_share(self) -> float:
        """0 where there is no peer to lend to, and for ranks, whose frames hold parts of pages."""
        worker = self._config.worker
        return self._config.tiers.l2.share if worker.count > 1 and worker.tensor_parallel == 1 else 0.0

    def _socket(self, place: Place) -> str:
        return str(self._sockets / f"{place.node_id}.sock")


def _files(tls: TransferTls | None) -> TlsFiles | None:
    return None if tls is None else TlsFiles(tls.cert, tls.key, tls.ca)
