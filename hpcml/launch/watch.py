"""Looking at a run, whatever runs it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from hpcml.launch.cluster import ClusterWatcher
from hpcml.launch.journal import read_journal
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import Status, Watcher

#: Seconds between two questions to a cluster's scheduler, which serves many people.
ASK_SECONDS = 30.0
_LOOK_SECONDS = 1.0
#: Looking at a large run pauses this many times as long as it took: a login node has other users.
_PAUSE = 4.0


class RunWatcher(Protocol):
    """Looks at a run again and again. ``trouble`` says what could not be found out, and why."""

    trouble: str | None

    def ask(self, older: float = 0.0) -> bool:
        """Ask the scheduler, unless that was done less than ``older`` seconds ago.

        Returns:
            Whether it was asked.
        """

    def refresh(self) -> Status:
        """The states now: the files as they are, the scheduler as it was asked last."""

    def alive(self, started: Mapping[str, Any]) -> bool | None:
        """Whether the attempt of a ``started`` event lives; None if that cannot be told."""

    def going(self, status: Status) -> bool:
        """Whether something of the run is running or waiting, as far as is known."""

    def remove(self, status: Status, cancelled: set[int]) -> str | None:
        """Take tasks out of the queue whose cells are cancelled; returns what went wrong."""

    def release(self) -> list[str]:
        """Let tasks go on that the scheduler holds for no fault of theirs; what to say of it."""


class LocalWatcher:
    """Looks at a run on this machine, where the files say everything."""

    trouble: str | None = None

    def __init__(self, run: RunFolder) -> None:
        self._run = run
        self._watcher = Watcher(run)

    def ask(self, older: float = 0.0) -> bool:
        """There is nobody to ask."""
        return False

    def refresh(self) -> Status:
        """The states now."""
        return self._watcher.refresh()

    def alive(self, started: Mapping[str, Any]) -> bool | None:
        """Nobody knows of other machines."""
        return None

    def going(self, status: Status) -> bool:
        """Whether a command is at the cells, or some run without one."""
        return bool(status.in_state("running")) or _has_driver(self._run)

    def remove(self, status: Status, cancelled: set[int]) -> str | None:
        """There is no queue; a command that is at the cells looks into their files."""
        return None

    def release(self) -> list[str]:
        """Nobody holds anything."""
        return []


def watch(run: RunFolder) -> RunWatcher:
    """Who can tell the states of ``run``."""
    # By the newest submission: a run may have been on another site before.
    return next(iter(watchers(run)), None) or LocalWatcher(run)


def watchers(run: RunFolder) -> list[ClusterWatcher]:
    """Who can tell the states of ``run`` on clusters, the one of the newest submission first."""
    kinds: dict[type[ClusterWatcher], None] = {}
    for entry in reversed(read_journal(run)):
        if "lanes" in entry:
            from hpcml.launch.volcano.states import VolcanoWatcher

            kinds[VolcanoWatcher] = None
        elif "link" in entry:
            from hpcml.launch.slurm.states import SlurmWatcher

            kinds[SlurmWatcher] = None
    return [kind(run) for kind in kinds]


def follow(
    watcher: RunWatcher,
    show: Callable[[Status], None],
    say: Callable[[str], None],
    *,
    releases: bool = False,
) -> Status:
    """Show a run until nothing of it runs or waits any more.

    Args:
        watcher: the run.
        show: called each second with the states; less often where looking takes long.
        say: told when something cannot be found out.
        releases: let tasks go on that the scheduler holds for no fault of theirs.

    Returns:
        The states at the end.
    """
    told: str | None = None
    while True:
        begun = time.monotonic()
        if watcher.ask(ASK_SECONDS) and releases:
            for line in watcher.release():
                say(line)
        status = watcher.refresh()
        if watcher.trouble not in (None, told):
            say(str(watcher.trouble))
        told = watcher.trouble
        show(status)
        if not watcher.going(status):
            return status
        time.sleep(max(_LOOK_SECONDS, _PAUSE * (time.monotonic() - begun)))


def _has_driver(run: RunFolder) -> bool:
    try:
        descriptor = os.open(run.path / "driver", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
