"""Sharing work by files: who has what, and when it is free again."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from hpcml.infer import claims
from hpcml.infer.claims import Claims

LEASE = 0.4


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    for number in range(4):
        (tmp_path / "workers" / str(number)).mkdir(parents=True)
        (tmp_path / "workers" / str(number) / "events.jsonl").touch()
    return tmp_path / "claims", tmp_path / "workers"


def make(folders: tuple[Path, Path], worker: int, lease: float = LEASE) -> Claims:
    return Claims(folders[0], worker, folders[1], lease)


def alive(folders: tuple[Path, Path], worker: int) -> int:
    """Hold what a living worker holds."""
    descriptor = os.open(folders[1] / str(worker) / "events.jsonl", os.O_RDWR)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    return descriptor


def test_everybody_gets_another_piece(folders: tuple[Path, Path]) -> None:
    pieces = [f"{number:06}" for number in range(200)]
    workers = [make(folders, number, 100) for number in range(4)]
    held = [alive(folders, number) for number in range(4)]
    taken: list[str] = []

    def work(mine: Claims) -> None:
        while (claim := mine.take(pieces)) is not None:
            taken.append(claim.piece)
            mine.forget(claim)

    threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(taken) == pieces
    for descriptor in held:
        os.close(descriptor)


def test_what_is_given_back_is_free(folders: tuple[Path, Path]) -> None:
    first, second = make(folders, 0), make(folders, 1)
    held = alive(folders, 0)
    claim = first.take(["a"])
    assert claim is not None
    assert second.take(["a"]) is None
    first.release(claim)
    again = second.take(["a"])
    assert again is not None
    assert again.number == 2
    os.close(held)


def test_the_next_attempt_of_a_worker_has_what_the_last_one_had(
    folders: tuple[Path, Path],
) -> None:
    held = alive(folders, 0)
    assert make(folders, 0).take(["a"]) is not None
    assert make(folders, 1).take(["a"]) is None
    assert make(folders, 0).take(["a"]) is not None
    os.close(held)


def test_a_dead_worker_on_this_machine_is_known_by_its_lock(folders: tuple[Path, Path]) -> None:
    held = alive(folders, 0)
    assert make(folders, 0, 1000).take(["a"]) is not None
    other = make(folders, 1, 1000)
    assert other.take(["a"]) is None
    os.close(held)
    assert other.take(["a"]) is not None


def test_a_dead_worker_elsewhere_is_known_by_its_silence(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever its clock says: times in the past or the future change nothing."""
    monkeypatch.setattr(claims.socket, "gethostname", lambda: "elsewhere")
    silent = make(folders, 0, 1e6)  # which renews too late
    paths = []
    for piece in ("past", "future"):
        claim = silent.take([piece])
        assert claim is not None
        paths.append(claim.path)
    os.utime(paths[0], (0, 0))
    os.utime(paths[1], (4e9, 4e9))
    monkeypatch.setattr(claims.socket, "gethostname", lambda: "here")
    other = make(folders, 1)
    assert other.take(["past", "future"]) is None
    time.sleep(LEASE / 2)
    assert other.take(["past", "future"]) is None
    time.sleep(LEASE)
    found = [other.take(["past", "future"]), other.take(["past", "future"])]
    assert sorted(claim.piece for claim in found if claim) == ["future", "past"]


def test_a_living_worker_elsewhere_keeps_its_claim(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claims.socket, "gethostname", lambda: "elsewhere")
    living = make(folders, 0)
    assert living.take(["a"]) is not None
    monkeypatch.setattr(claims.socket, "gethostname", lambda: "here")
    other = make(folders, 1)
    deadline = time.monotonic() + 4 * LEASE
    while time.monotonic() < deadline:
        assert other.take(["a"]) is None
        time.sleep(LEASE / 8)
