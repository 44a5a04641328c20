"""What this machine has, as far as this process may use it."""

from __future__ import annotations

import os
import shutil
import subprocess


def cores() -> int:
    """Cores this process may run on: its affinity, and the quota of its control group."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    quota = _quota()
    return max(1, min(allowed or 1, quota)) if quota else max(1, allowed or 1)


def gpus() -> list[str]:
    """Names of the GPUs this process may use, as ``CUDA_VISIBLE_DEVICES`` takes them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [device for device in visible.split(",") if device not in ("", "-1")]
    if shutil.which("nvidia-smi") is None:
        return []
    result = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.split() if result.returncode == 0 else []


def memory() -> int:
    """Installed memory in bytes, or the limit of the control group where that is less."""
    installed = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = _read_group("memory.max")
    return min(installed, int(limit)) if limit and limit.isdigit() else installed


def _quota() -> int | None:
    """Cores that the control group's CPU quota allows, rounded up."""
    text = _read_group("cpu.max")
    if not text or text.startswith("max"):
        return None
    quota, period = (int(part) for part in text.split())
    return -(-quota // period)


def _read_group(name: str) -> str | None:
    """A file of this process's control group (version 2), or None."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            group = file.read().split("0::", 1)[1].split("\n", 1)[0]
        with open(f"/sys/fs/cgroup{group.rstrip('/')}/{name}", encoding="ascii") as file:
            return file.read().strip()
    except (OSError, IndexError):
        return None
