"""Ranks of trainings by the dozen: forked from a process that has everything imported."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
import traceback
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.integration.train import cells

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(
    [
        "hpcml.train.fsdp",
        "hpcml.train.deepspeed_engine",
        "deepspeed.runtime.zero.muon.muon_optimizer",  # else imported by its first optimizer
    ]
)


def start(
    cell_dir: Path,
    data_root: Path,
    rank: int = 0,
    world_size: int = 1,
    port: int = 0,
    stop_after: int | None = None,
) -> BaseProcess:
    """Start a rank that does what ``python -m hpcml.train`` does."""
    values = {
        **cells.environment(cell_dir, data_root),
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    log = str(cell_dir / f"log.{rank}")
    process = _FORKS.Process(target=_rank, args=(values, log, stop_after))
    process.start()
    return process


def _rank(values: dict[str, str], log: str, stop_after: int | None) -> None:
    import torch

    import hpcml.train.__main__ as payload

    descriptor = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.environ.update(values)
    torch.set_num_threads(1)
    payload.StopRequest = lambda file: cells.StopAfter(stop_after)
    code = 1
    try:
        code = payload.main()
    except Exception:  # noqa: BLE001
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def start_all(
    cell_dir: Path, data_root: Path, world_size: int, stop_after: int | None = None
) -> list[BaseProcess]:
    """Start all ranks of a training."""
    port = cells.free_port()
    return [
        start(cell_dir, data_root, rank, world_size, port, stop_after) for rank in range(world_size)
    ]


def train(
    cell_dir: Path,
    data_root: Path,
    world_size: int,
    stop_after: int | None = None,
    seconds: float = 240,
) -> list[int | None]:
    """Train a cell with several ranks; returns their exit codes."""
    ranks = start_all(cell_dir, data_root, world_size, stop_after)
    end = time.monotonic() + seconds
    try:
        # One that fails leaves the others waiting.
        while any(rank.is_alive() for rank in ranks) and time.monotonic() < end:
            time.sleep(0.02)
            if any(rank.exitcode not in (None, 0, 75) for rank in ranks):
                break
        return [rank.exitcode for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def log(cell_dir: Path) -> str:
    """What the first rank said."""
    return (cell_dir / "log.0").read_text()
