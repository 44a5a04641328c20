"""What a run's journal says of its jobs on Volcano, and how a call that was cut off ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from hpcml.launch.journal import Entry, open_calls
from hpcml.launch.volcano.client import Object
from hpcml.runs.folder import RunFolder

FOLDER = "hpcml-folder"


class LaneTask(NamedTuple):
    """A task of a submission: the job that runs it, the pod there, and the submission."""

    job: str
    pod: str
    submission: int


def of_volcano(entries: Iterable[Entry]) -> list[Entry]:
    """The entries that are about Volcano."""
    return [entry for entry in entries if "lanes" in entry]


def pod_name(job: str, gang: bool, index: int) -> str:
    """What Volcano calls a pod."""
    return f"{job}-{'node' if gang else 'task'}-{index}"


def submitted_tasks(run: RunFolder, entries: Sequence[Entry]) -> dict[int, list[LaneTask]]:
    """The tasks that were submitted for each cell, the newest first."""
    found: dict[int, list[LaneTask]] = {}
    for entry in reversed(of_volcano(entries)):
        if entry["event"] != "submitted":
            continue
        record = run.read_submission(entry["submission"])
        places = run.places(record)
        pack, workers = record["pack"], record.get("workers", 1)
        total = -(-len(places) // pack) * workers
        for index in range(entry["lanes"]):
            # A gang has one lane, and its first pod leads.
            pod = pod_name(entry["job"], entry["gang"], index)
            for task in range(entry["first"] + index, total, entry["stride"]):
                start = task // workers * pack
                for cell in chain.from_iterable(places[start : start + pack]):
                    found.setdefault(cell, []).append(
                        LaneTask(entry["job"], pod, entry["submission"])
                    )
    return found


def settled(run: RunFolder, entries: Sequence[Entry], jobs: Mapping[str, Object]) -> list[Entry]:
    """What became of the calls whose end the journal does not tell.

    A job has a name that no other submission of the run has, so it is on the server or it is not.

    Args:
        run: the run.
        entries: its journal.
        jobs: the run's jobs on the server, by name.

    Returns:
        The entries that the journal lacks.
    """
    found = []
    for call in open_calls(of_volcano(entries)):
        what: dict[str, Any] = {
            key: call[key]
            for key in ("submission", "part", "job", "gang", "first", "lanes", "stride", "label")
        }
        if call["job"] in jobs and is_of(jobs[call["job"]], run):
            found.append({"event": "submitted", **what, "found": True})
        else:
            found.append({"event": "vanished", **what})
    return found


def is_of(job: Object, run: RunFolder) -> bool:
    """Whether a job on the server is one of the run."""
    annotations = job["metadata"].get("annotations") or {}
    return bool(annotations.get(FOLDER) == str(run.path))


def labels(entries: Iterable[Entry]) -> set[str]:
    """The labels by which the run's jobs are found."""
    return {entry["label"] for entry in of_volcano(entries)}
