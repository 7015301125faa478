"""A node for a gateway under test whose cache is a real one, which can be recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gateway_kit import EchoWorker, echo_info

from kvtier.tier.node.service import CacheService
from kvtier.tier.record.writer import RecordingStatus, file_of


@dataclass
class RecordingNode(EchoWorker):
    """Answers Record as cluster/node.py does."""

    service: CacheService | None = None

    async def record(self, path: str, max_bytes: int, is_only: bool) -> RecordingStatus:
        assert self.service is not None
        return self.service.record(file_of(path, self.info.node_id, is_only=is_only), max_bytes)

    async def stop_recording(self) -> RecordingStatus | None:
        assert self.service is not None
        return self.service.stop_recording()


def recording_node(service: CacheService) -> RecordingNode:
    """A node around this cache."""
    return RecordingNode(replace(echo_info(), node_id=service.node_id), service=service)
