"""What became of one cell, attempt by attempt, as its files tell it."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcml.files import plain_errors
from hpcml.runs.events import JsonLines
from hpcml.runs.folder import RunFolder, workers


@dataclass(slots=True)
class Attempt:
    """One attempt at a cell.

    Attributes:
        worker: of an inference, whose attempt it is.
        number: counts from 1.
        started, ended: as events write times; without an end it runs, or was lost.
        resumed_from: the step of the checkpoint that it went on from, as far as events say.
        step: how far it got.
        cause, reason, code: how it ended.
        used, budget: of how many attempts again for this cause, in this submission, one is used.
        notes: what happened meanwhile: signals, damaged checkpoints, with their times.
        snapshot: the code that it ran, as a folder in the run folder.
    """

    number: int
    worker: int | None = None
    host: str | None = None
    job: str | None = None
    submission: int | None = None
    started: str | None = None
    ended: str | None = None
    resumed_from: int | None = None
    step: int | None = None
    cause: str | None = None
    reason: str | None = None
    code: int | None = None
    again: bool = False
    used: int | None = None
    budget: int | None = None
    snapshot: str | None = None
    rung: int | None = None
    notes: list[tuple[str, str]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A folder or file that lies among a cell's checkpoints.

    Attributes:
        step: None where it is not one of ``hpcml.train``.
        whole: whether all files are there in their sizes; None where nothing says so.
        pointers: which of ``latest``, ``best`` and ``final`` name it.
    """

    name: str
    step: int | None
    bytes: int
    whole: bool | None
    pointers: list[str]


@dataclass(frozen=True, slots=True)
class Life:
    """Everything that the files of a cell tell about it.

    Attributes:
        cancelled: when somebody cancelled it.
        anew: when somebody let it begin anew, and where what it had lies since, in its folder.
    """

    attempts: list[Attempt]
    checkpoints: list[Checkpoint]
    cancelled: list[str]
    anew: list[tuple[str, str]]


def life_of(run: RunFolder, cell_id: str) -> Life:
    """The life of one cell so far."""
    folder = run.cell_dir(cell_id)
    attempts: list[Attempt] = []
    with plain_errors(f"read {folder}"):
        for path in workers(folder) or [folder]:
            worker = int(path.name) if path != folder else None
            attempts += _attempts(run, JsonLines(path / "events.jsonl").read(), worker)
        own = JsonLines(folder / "events.jsonl").read()
        cancelled = [str(event["time"]) for event in own if event.get("event") == "cancelled"]
        checkpoints = _checkpoints(folder / "checkpoints")
        anew = [(str(e["time"]), str(e.get("aside"))) for e in own if e.get("event") == "anew"]
    attempts.sort(key=lambda attempt: attempt.started or "")
    return Life(attempts, checkpoints, cancelled, anew)


def _attempts(run: RunFolder, events: list[dict[str, Any]], worker: int | None) -> list[Attempt]:
    found: list[Attempt] = []
    saved: dict[str, int] = {}  # step by the checkpoint's path
    used: dict[tuple[Any, Any], int] = {}
    for event in events:
        kind, time = event.get("event"), str(event.get("time", ""))
        if kind == "started":
            number = event.get("attempt")
            found.append(
                Attempt(
                    number if isinstance(number, int) else len(found) + 1,
                    worker,
                    host=event.get("host"),
                    job=event.get("job") or None,
                    submission=event.get("submission"),
                    started=time,
                    resumed_from=max(saved.values(), default=None),
                    snapshot=event.get("code"),
                    rung=event.get("rung"),
                )
            )
        elif kind == "checkpoint":
            saved[Path(str(event.get("path"))).name] = event["step"]
            if found:
                found[-1].step = event["step"]
        elif kind == "damaged":
            name = Path(str(event.get("path"))).name  # damaged-step-<n>-<k>
            saved.pop("-".join(name.split("-")[1:3]), None)
            if found:
                found[-1].resumed_from = max(saved.values(), default=None)
                found[-1].notes.append((time, f"{name} was set aside: {event.get('reason')}"))
        elif kind == "anew":
            saved.clear()
        elif kind == "signal" and found:
            found[-1].notes.append((time, f"asked to stop ({event.get('signal')})"))
        elif kind == "ended" and found:
            last = found[-1]
            last.ended, last.cause, last.reason = time, event.get("cause"), event.get("reason")
            last.code, last.again = event.get("code"), bool(event.get("again"))
            last.step = event.get("step") if event.get("step") is not None else last.step
            key = last.submission, last.cause
            used[key] = used.get(key, 0) + 1
            budget = _retry(run, last.submission).get(str(last.cause))
            if budget is not None:
                last.used, last.budget = used[key], budget
    return found


def _retry(run: RunFolder, submission: int | None) -> dict[str, int]:
    """The budgets that a submission gives, by cause."""
    path = run.submissions / f"{submission or 0:03}.json"
    try:
        retry: dict[str, int] = json.loads(path.read_bytes())["settings"]["retry"]
    except (FileNotFoundError, ValueError, KeyError):
        return {}
    return retry


def _checkpoints(folder: Path) -> list[Checkpoint]:
    try:
        names = [name for name in os.listdir(folder) if not name.startswith(".writing-")]
    except (FileNotFoundError, NotADirectoryError):
        return []
    pointers: dict[str, list[str]] = {}
    for pointer in ("latest", "best", "final"):
        if pointer in names and (folder / pointer).is_file():
            names.remove(pointer)
            named = (folder / pointer).read_text(encoding="utf-8", errors="replace").strip()
            pointers.setdefault(named, []).append(pointer)
    return sorted(
        (_checkpoint(folder / name, pointers.get(name, [])) for name in names),
        key=lambda found: (found.step is None, found.step or 0, found.name),
    )


def _checkpoint(path: Path, pointers: list[str]) -> Checkpoint:
    step = path.name.removeprefix("step-")
    is_step = path.name.startswith("step-") and step.isdecimal() and path.is_dir()
    whole = _whole(path) if is_step else None
    return Checkpoint(path.name, int(step) if is_step else None, size_of(path), whole, pointers)


def _whole(path: Path) -> bool:
    """Whether all files of a checkpoint are there; their digests are read when it is loaded."""
    try:
        files = json.loads((path / "manifest.json").read_bytes())["files"]
        return all((path / name).stat().st_size == file["size"] for name, file in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def size_of(path: Path) -> int:
    """Bytes of a file, or of all files below a folder."""
    if path.is_symlink() or not path.is_dir():
        return path.lstat().st_size
    return sum(
        os.lstat(os.path.join(folder, name)).st_size
        for folder, _, names in os.walk(path)
        for name in names
    )
