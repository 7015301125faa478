"""A worker that lends most of its L1 until it is killed: lending_process.py MODEL SOCKET."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

from worker_kit import serving, tiny_runner


def main(model: str, socket_path: str) -> None:
    """Serve nothing."""
    runner = tiny_runner(Path(model), 64, share_arena=True)
    with serving(runner, Path(socket_path), worker_id="lender", l2_share=0.75):
        signal.pause()


if __name__ == "__main__":
    main(*sys.argv[1:])
