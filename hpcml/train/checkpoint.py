"""Checkpoints on disk: complete or absent, verified before use, whatever is in them.

``step-<n>/`` appears by a rename, after all its files and ``manifest.json`` were flushed; then the
pointers ``best`` and ``latest``, text files with a folder's name, are replaced.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from hpcml.worker.flush import flush_file, flush_folder, flush_tree
from hpcml.worker.metrics import append_line

MANIFEST = "manifest.json"
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_DIGESTS = ".digests-"
_STEP = re.compile(r"step-(\d+)")


class CheckpointError(Exception):
    """A checkpoint can't be written, or none can be used; the message says why."""


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint.

    Attributes:
        step: the number of finished steps that it holds.
        path: its folder.
    """

    step: int
    path: Path


@dataclass(frozen=True)
class Writing:
    """A checkpoint that is being written.

    Attributes:
        step: the number of finished steps.
        folder: to be filled.
        started: when it began, on the monotonic clock.
    """

    step: int
    folder: Path
    started: float


class CheckpointStore:
    """The checkpoints of one cell. One process at a time writes to it.

    Args:
        folder: ``checkpoints/`` of the cell; made if it is not there.
        belongs_to: what the checkpoints are of, such as the cell and the data. One of
            something else is never loaded.
        events: the cell's ``events.jsonl``, or None.
        keep: how many of the newest remain; the best one always does.
    """

    def __init__(
        self,
        folder: Path,
        belongs_to: Mapping[str, str],
        events: Path | None = None,
        keep: int = 2,
    ) -> None:
        self.folder = folder
        self._belongs_to = dict(belongs_to)
        self._events = events
        self._keep = max(keep, 1)
        self._removals: list[threading.Thread] = []

    # -- writing --------------------------------------------------------------------------------

    @contextlib.contextmanager
    def saving(self, step: int, best: bool = False) -> Iterator[Path]:
        """Write a checkpoint: the body fills the folder, leaving the block publishes it.

        Args:
            step: finished steps.
            best: whether it is the best one so far.

        Raises:
            CheckpointError: the disk is full. What was there before is untouched.
        """
        writing = self.begin(step)
        try:
            with self.explained(step):
                yield writing.folder
            self.publish(writing, best)
            self.settle()
        finally:
            self.abandon(writing)

    def begin(self, step: int) -> Writing:
        """Begin a checkpoint that is published later: an empty folder to fill.

        Raises:
            CheckpointError: the disk is full.
        """
        self.settle()
        writing = Writing(step, self.folder / f".writing-{step}-{os.getpid()}", time.monotonic())
        with self.explained(step):
            self.folder.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(writing.folder, ignore_errors=True)
            writing.folder.mkdir()
        return writing

    def publish(self, writing: Writing, best: bool = False) -> None:
        """Make what was written a checkpoint; those that it replaces are removed meanwhile.

        Raises:
            CheckpointError: the disk is full.
        """
        with self.explained(writing.step):
            self._publish(writing.folder, writing.step, best, writing.started)

    def settle(self) -> None:
        """Wait until what newer checkpoints replaced is removed."""
        for removal in self._removals:
            removal.join()
        self._removals.clear()

    def abandon(self, writing: Writing) -> None:
        """Remove what was written, if it was not published."""
        shutil.rmtree(writing.folder, ignore_errors=True)

    @contextlib.contextmanager
    def explained(self, step: int) -> Iterator[None]:
        """Write into the folder of a checkpoint that is being written, also by other processes.

        Raises:
            CheckpointError: the disk is full.
        """
        try:
            yield
        except Exception as error:
            if _is_full(error):
                raise CheckpointError(
                    f"no space left for the checkpoint of step {step} in {self.folder}; "
                    "the checkpoints before it are untouched: free some space and run again"
                ) from error
            raise

    def mark(self, pointer: str, step: int) -> None:
        """Name an existing checkpoint: ``best``, or ``final``, the one that the result is of."""
        if (self.folder / f"step-{step}").is_dir():
            self._point(pointer, step)

    def _publish(self, writing: Path, step: int, best: bool, started: float) -> None:
        known = _digests(writing)
        files = [path for path in sorted(writing.rglob("*")) if path.is_file()]
        manifest = {
            "step": step,
            "belongs_to": self._belongs_to,
            "files": {
                str(path.relative_to(writing)): known.get(path) or _described(path)
                for path in files
            },
        }
        (writing / MANIFEST).write_text(json.dumps(manifest, indent=1))
        flush_tree(writing)
        final = self.folder / f"step-{step}"
        if final.exists():
            # The same step again has the same content; the old one was flushed long ago.
            self._remove(final)
        writing.rename(final)
        flush_folder(self.folder)
        if best:
            self._point("best", step)
        self._point("latest", step)
        self._event("checkpoint", step=step, path=str(final), seconds=time.monotonic() - started)
        self._prune()

    def _prune(self) -> None:
        best = self._pointed("best")
        for checkpoint in self._complete()[self._keep :]:
            if checkpoint.path.name != best:
                self._remove(checkpoint.path)

    def _remove(self, path: Path) -> None:
        # A removal that is cut off must not leave half a checkpoint under its name.
        removing = path.with_name(f".removing-{path.name}")
        shutil.rmtree(removing, ignore_errors=True)
        path.rename(removing)
        # A large one takes long to remove, and nobody has to wait for that.
        removal = threading.Thread(target=shutil.rmtree, args=(removing, True))
        removal.start()
        self._removals.append(removal)

    def _point(self, pointer: str, step: int) -> None:
        temporary = self.folder / f".{pointer}-{os.getpid()}"
        with open(temporary, "w") as file:
            file.write(f"step-{step}\n")
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.folder / pointer)
        flush_folder(self.folder)

    # -- reading --------------------------------------------------------------------------------

    def load_latest(self) -> Checkpoint | None:
        """The newest checkpoint that passes its verification, or None.

        Damaged ones are set aside as ``damaged-step-<n>-<k>``, which an event says; what a killed
        process left half-written is removed, and the pointers are put right.

        Raises:
            CheckpointError: the newest checkpoint belongs to something else.
        """
        for left in (*self.folder.glob(".writing-*"), *self.folder.glob(".removing-*")):
            shutil.rmtree(left, ignore_errors=True)
        for pointer in ("latest", "best", "final"):
            for left in self.folder.glob(f".{pointer}-*"):
                left.unlink()
        for checkpoint in self._complete():
            reason = self._damage(checkpoint)
            if reason is not None:
                self._set_aside(checkpoint, reason)
                continue
            if self._pointed("latest") != checkpoint.path.name:
                self._point("latest", checkpoint.step)
            self._drop_dangling("best")
            return checkpoint
        for pointer in ("latest", "best"):
            self._drop_dangling(pointer)
        return None

    def find(self, which: str | int) -> Checkpoint:
        """A checkpoint to use, verified but otherwise left as it is.

        Args:
            which: ``final`` or ``best`` (the latest, if none was named so), ``latest``, or a step.

        Raises:
            CheckpointError: it is not there, or it is damaged.
        """
        complete = self._complete()
        if isinstance(which, int):
            found = [checkpoint for checkpoint in complete if checkpoint.step == which]
        else:
            named = self._pointed(which)
            found = [checkpoint for checkpoint in complete if checkpoint.path.name == named]
            found = found or complete[:1]
        if not found:
            there = ", ".join(str(checkpoint.step) for checkpoint in complete) or "none"
            raise CheckpointError(f"no checkpoint {which} in {self.folder}; steps there: {there}")
        reason = self._damage(found[0])
        if reason is not None:
            raise CheckpointError(f"{found[0].path} is damaged: {reason}")
        return found[0]

    def best(self) -> Checkpoint | None:
        """The checkpoint that was named the best one, unverified, or None."""
        name = self._pointed("best")
        for checkpoint in self._complete():
            if checkpoint.path.name == name:
                return checkpoint
        return None

    def _complete(self) -> list[Checkpoint]:
        """All checkpoints, the newest first."""
        if not self.folder.is_dir():
            return []
        found = []
        for path in self.folder.iterdir():
            match = _STEP.fullmatch(path.name)
            if match and path.is_dir():
                found.append(Checkpoint(int(match[1]), path))
        return sorted(found, key=lambda checkpoint: -checkpoint.step)

    def _damage(self, checkpoint: Checkpoint) -> str | None:
        """What is wrong with the files, or None."""
        try:
            manifest = json.loads((checkpoint.path / MANIFEST).read_text())
            if manifest["step"] != checkpoint.step:
                return f"its manifest is of step {manifest['step']}"
            files = manifest["files"].items()
            for name, expected in files:
                path = checkpoint.path / name
                if path.stat().st_size != expected["size"]:
                    return f"{name} has {path.stat().st_size} bytes instead of {expected['size']}"
            with ThreadPoolExecutor() as pool:
                digests = pool.map(_sha256, [checkpoint.path / name for name, _ in files])
                for (name, expected), digest in zip(files, digests, strict=True):
                    if digest != expected["sha256"]:
                        return f"{name} has another content than was written"
            owner = manifest["belongs_to"]
        except FileNotFoundError as error:
            return f"{Path(error.filename).name} is missing"
        except (ValueError, KeyError, TypeError, AttributeError):
            return f"{MANIFEST} is unreadable"
        for what, mine in self._belongs_to.items():
            if owner.get(what) != mine:
                raise CheckpointError(
                    f"{checkpoint.path} is of another {what} ({owner.get(what)}, now it is "
                    f"{mine}). Bring back what was there, or remove {self.folder} to begin anew"
                )
        return None

    def _set_aside(self, checkpoint: Checkpoint, reason: str) -> None:
        number = 1
        while (aside := self.folder / f"damaged-step-{checkpoint.step}-{number}").exists():
            number += 1
        checkpoint.path.rename(aside)
        self._event("damaged", path=str(aside), reason=reason)

    def _pointed(self, pointer: str) -> str | None:
        try:
            return (self.folder / pointer).read_text().strip()
        except (FileNotFoundError, UnicodeDecodeError):
            return None

    def _drop_dangling(self, pointer: str) -> None:
        name = self._pointed(pointer)
        if name is not None and not (_STEP.fullmatch(name) and (self.folder / name).is_dir()):
            (self.folder / pointer).unlink()

    def _event(self, event: str, **fields: object) -> None:
        if self._events is not None:
            time_ = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
            append_line(self._events, {"time": time_, "event": event, **fields})


def _is_full(error: BaseException) -> bool:
    """Whether the disk is full; torch and safetensors say so in errors of their own."""
    while True:
        if isinstance(error, OSError) and error.errno in _NO_SPACE:
            return True
        text = str(error)
        if any(mark in text for mark in ("No space left", "os error 28", "unexpected pos")):
            return True
        following = error.__cause__ or error.__context__
        if following is None:
            return False
        error = following


def write_digests(folder: Path, name: str, paths: Iterable[Path]) -> None:
    """Leave the digests of files for :meth:`CheckpointStore.publish`, which need not read them.

    Args:
        folder: of the files, within a checkpoint that is being written.
        name: which no other process uses.
        paths: of the files.
    """
    described = {}
    for path in paths:
        described[path.name] = _described(path)
        flush_file(path)  # by the node that has it in its memory
    (folder / f"{_DIGESTS}{name}").write_text(json.dumps(described))


def _digests(writing: Path) -> dict[Path, dict[str, object]]:
    """What :func:`write_digests` left; the files that say so are removed."""
    found: dict[Path, dict[str, object]] = {}
    for path in [*writing.rglob(f"{_DIGESTS}*")]:
        described = json.loads(path.read_text())
        found |= {path.with_name(name): each for name, each in described.items()}
        path.unlink()
    return found


def _described(path: Path) -> dict[str, object]:
    return {"size": path.stat().st_size, "sha256": _sha256(path)}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
