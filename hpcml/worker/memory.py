"""Lack of memory: how it is known that a payload died of it."""

import os
import re
import signal
from typing import Optional

# How a process ends that SIGKILL ended, and how a shell ends whose program SIGKILL ended.
KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)

# What slurmstepd writes to the stderr of the batch script when it, or the kernel, killed for lack
# of memory: "StepId=5.batch exceeded memory limit (9 > 8), being killed", "Detected 1 oom-kill
# event(s) in StepId=5.batch. …", in Slurm 23.11 "oom_kill event". A slurmd with a node's name of
# its own puts that behind its own name.
_OF_SLURM = re.compile(
    r"^slurmstepd[^:]*: error: (.*(?:exceeded (?:\w+ )?memory limit|oom.kill event).*)$",
    re.IGNORECASE | re.MULTILINE,
)


def kills() -> int:
    """How often the kernel killed for lack of memory in this process's control group."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            groups = dict(line.rstrip("\n").split(":", 2)[1:] for line in file)
        if "memory" in groups:  # version 1
            return _count(f"/sys/fs/cgroup/memory{groups['memory']}/memory.oom_control")
        return _count(f"/sys/fs/cgroup{groups['']}/memory.events")
    except (OSError, KeyError, ValueError):
        return 0


def slurm_said(path: str, since: int = 0) -> Optional[str]:
    """What Slurm said of memory in a batch script's stderr, or None.

    Args:
        path: the file.
        since: how long the file was when the attempt in question began.
    """
    try:
        with open(path, "rb") as file:
            file.seek(since)
            found = _OF_SLURM.search(file.read().decode(errors="replace"))
    except OSError:
        return None
    return found[1].strip()[:300] if found else None


def stderr_of(run_dir: str, submission: int, job: str) -> str:
    """Where the batch script of a task writes its stderr, as its script says."""
    return os.path.join(run_dir, "tasks", f"{submission:03d}.{job}.err")


def _count(path: str) -> int:
    with open(path, encoding="ascii") as file:
        counts = dict(line.split() for line in file)
    return int(counts["oom_kill"])
