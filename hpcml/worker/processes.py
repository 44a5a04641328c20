"""Processes of a payload: which are alive, which listen to a signal, which were left behind."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from typing import Callable, Optional

_PROC = "/proc"


def die_with_parent() -> "Optional[Callable[[], None]]":
    """What a child calls before ``exec`` so that the kernel kills it when its worker dies.

    None where the system has no such call (macOS); there the lock on the cell keeps the next
    attempt waiting until an orphan is gone.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None)
    set_parent_death_signal = 1  # PR_SET_PDEATHSIG, prctl(2)
    parent = os.getpid()

    def call() -> None:
        libc.prctl(set_parent_death_signal, signal.SIGKILL)
        # The worker may have died between fork and prctl; then nobody would send the signal.
        if os.getppid() != parent:
            os._exit(1)

    return call


def deliver(group: int, signum: int) -> str:
    """Send ``signum`` to the processes of the process group ``group`` that handle it.

    A payload is often a tree: a shell that waits for a program, a program with helper processes.
    A signal whose default is to terminate would kill the shell, or a helper that the program
    needs for its last checkpoint. So only processes that installed a handler get it. Where none
    did, the whole group gets TERM, the customary request to leave.

    Returns:
        The name of the signal that was sent, such as ``USR1``.
    """
    listening = [pid for pid in _members(group) if _catches(pid, signum)]
    for pid in listening:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signum)
    if listening:
        return name_of(signum)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)
    return "TERM"


def name_of(signum: int) -> str:
    """The name of a signal without its ``SIG``; real-time signals have a number only."""
    try:
        return signal.Signals(signum).name[3:]
    except ValueError:
        return f"signal {signum}"


def kill_group(group: int) -> None:
    """End every process of the group at once."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, signal.SIGKILL)


def kill_marked(variable: str, value: str) -> int:
    """Kill the processes on this machine that have ``variable=value`` in their environment.

    So what an attempt started is found wherever it went: helpers in sessions of their own, children
    of a parent that is gone. A process id that another program has got meanwhile is never taken
    for one of them.

    Returns:
        How many were killed.
    """
    marker = os.fsencode(f"{variable}={value}")
    killed = 0
    for pid in _pids():
        if pid == os.getpid():
            continue
        try:
            with open(f"{_PROC}/{pid}/environ", "rb") as file:
                environment = file.read().split(b"\0")
        except OSError:
            continue
        if marker in environment:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    return killed


def is_worker(pid: int, run_dir: str) -> bool:
    """Whether ``pid`` is a worker of this run that is alive on this machine."""
    try:
        with open(f"{_PROC}/{pid}/cmdline", "rb") as file:
            words = file.read().split(b"\0")
    except OSError:
        return False
    return b"hpcml.worker" in words and os.fsencode(run_dir) in words


def _pids() -> Iterator[int]:
    try:
        names = os.listdir(_PROC)
    except FileNotFoundError:
        return
    for name in names:
        if name.isdigit():
            yield int(name)


def _members(group: int) -> Iterator[int]:
    for pid in _pids():
        with contextlib.suppress(OSError):
            if os.getpgid(pid) == group:
                yield pid


def _catches(pid: int, signum: int) -> bool:
    try:
        with open(f"{_PROC}/{pid}/status", encoding="ascii", errors="replace") as file:
            for line in file:
                if line.startswith("SigCgt:"):
                    return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    except OSError:
        pass
    return False
