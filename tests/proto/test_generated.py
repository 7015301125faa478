"""The generated code in the repository is what the generator makes of the .proto files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "proto").glob("*.proto"))


def test_generated_code_is_up_to_date(tmp_path: Path) -> None:
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    names = [f"kvtier/proto/{proto.name}" for proto in PROTOS]

    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-I", "src", *out, *names], cwd=ROOT, check=True
    )

    made = {file.name: file.read_bytes() for file in (tmp_path / "kvtier" / "proto").iterdir()}
    committed = {file.name: file.read_bytes() for file in (ROOT / "proto").glob("*_pb2*.py*")}
    assert made == committed, "regenerate: the command is in proto/README.md"


@pytest.mark.parametrize("proto", PROTOS, ids=lambda proto: proto.name)
def test_every_field_is_numbered_once_in_order_of_its_message(proto: Path) -> None:
    """Numbers in order show at a glance that none was reused; a removed one must be `reserved`."""
    from kvtier.proto import cache_pb2, inference_pb2, page_transfer_pb2

    module = {
        "inference.proto": inference_pb2,
        "cache.proto": cache_pb2,
        "page_transfer.proto": page_transfer_pb2,
    }[proto.name]

    for message in module.DESCRIPTOR.message_types_by_name.values():
        numbers = [field.number for field in message.fields]
        assert numbers == sorted(numbers), message.full_name
