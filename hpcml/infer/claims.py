"""Sharing work among tasks that have nothing in common but a folder.

A claim of a piece of work is a file ``<piece>.<number>``, made by an exclusive link: whoever made
the newest one has the piece. Its owner renews it by touching it. Whoever wants a piece whose owner
is dead makes the next number.

No clocks are compared: the one who waits looks whether the time of the file *changes* while so
many seconds pass on its own clock. So neither the clocks of nodes nor that of a file server matter.
An owner that was only asleep goes on to write, but into files of its own claim, and what it
publishes late is refused by whoever was faster.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RENEW_SECONDS = 5.0
# A network filesystem may show the time of a file a minute late.
LEASE_SECONDS = 90.0


@dataclass(frozen=True)
class Claim:
    """A piece of work that this worker has.

    Attributes:
        piece: its name.
        number: counts the claims of the piece, from 1.
        path: the file.
    """

    piece: str
    number: int
    path: Path


class Claims:
    """The claims of a folder, as one worker sees and makes them.

    Args:
        folder: where they lie; shared by all workers.
        worker: the number of this worker. Only one process at a time has it.
        worker_dir: finds the folder of a worker by its number, whose ``events.jsonl`` it holds
            locked while it lives.
        lease: seconds without a sign of life after which an owner is dead.
    """

    def __init__(
        self, folder: Path, worker: int, workers: Path, lease: float = LEASE_SECONDS
    ) -> None:
        self._folder = folder
        self._worker = worker
        self._workers = workers
        self._lease = lease
        self._token = uuid.uuid4().hex
        self._seen: dict[str, tuple[int, float]] = {}
        self._mine: dict[str, Claim] = {}
        self._lock = threading.Lock()
        self._closed = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)
        threading.Thread(target=self._renew, daemon=True).start()

    def take(self, pieces: Iterable[str]) -> Claim | None:
        """Claim the first of some pieces that nobody else has, or whose owner is dead."""
        newest = self._newest()
        for piece in pieces:
            number = newest.get(piece, 0)
            if number and not self._is_free(f"{piece}.{number}"):
                continue
            claim = self._make(piece, number + 1)
            if claim is not None:
                return claim
        return None

    def release(self, claim: Claim) -> None:
        """Give a piece back, for anyone to go on with."""
        with self._lock:
            self._mine.pop(claim.piece, None)
        # A new content and not a removal: numbers must never be used twice.
        _write(claim.path, {"free": True})

    def forget(self, claim: Claim) -> None:
        """Renew a claim no more, since its piece is done."""
        with self._lock:
            self._mine.pop(claim.piece, None)

    def _make(self, piece: str, number: int) -> Claim | None:
        path = self._folder / f"{piece}.{number}"
        aside = self._folder / f".{piece}.{self._token}"
        owner = {
            "worker": self._worker,
            "token": self._token,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
        }
        _write(aside, owner)
        try:
            os.link(aside, path)
        except FileExistsError:
            return None
        finally:
            aside.unlink()
        claim = Claim(piece, number, path)
        with self._lock:
            self._mine[piece] = claim
        return claim

    def _newest(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for name in os.listdir(self._folder):
            piece, _, number = name.rpartition(".")
            if piece and not name.startswith("."):
                found[piece] = max(found.get(piece, 0), int(number))
        return found

    def _is_free(self, name: str) -> bool:
        """Whether the owner of a claim gave it back or is dead."""
        path = self._folder / name
        try:
            # Opening makes network filesystems look at the file's time anew.
            with path.open("rb") as file:
                owner = json.loads(file.read())
                changed = os.fstat(file.fileno()).st_mtime_ns
        except (OSError, ValueError):
            return False
        if owner.get("free"):
            return True
        if owner["worker"] == self._worker:
            return bool(owner["token"] != self._token)  # an earlier attempt of this worker
        if owner["host"] == socket.gethostname() and self._is_dead(owner):
            return True
        seen = self._seen.get(name)
        if seen is None or seen[0] != changed:
            self._seen[name] = changed, time.monotonic()
            return False
        return time.monotonic() - seen[1] > self._lease

    def _is_dead(self, owner: dict[str, Any]) -> bool:
        """Whether nobody on this machine holds the folder of the owner's worker."""
        try:
            descriptor = os.open(self._workers / str(owner["worker"]) / "events.jsonl", os.O_RDONLY)
        except OSError:
            return False
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return True

    def close(self) -> None:
        """Renew nothing any more."""
        self._closed.set()

    def _renew(self) -> None:
        while not self._closed.wait(min(RENEW_SECONDS, self._lease / 5)):
            with self._lock:
                mine = list(self._mine.values())
            for claim in mine:
                # A disturbance of the filesystem; the next time comes soon.
                with suppress(OSError):
                    os.utime(claim.path)


def _write(path: Path, content: dict[str, Any]) -> None:
    aside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    aside.write_text(json.dumps(content))
    aside.replace(path)
