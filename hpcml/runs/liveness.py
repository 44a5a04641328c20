"""Whether an attempt that has not said goodbye is still alive."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias

#: Asks whoever knows (the scheduler) about an attempt on another machine, by its ``started``
#: event. ``None`` means that nobody can tell.
Alive: TypeAlias = Callable[[Mapping[str, Any]], "bool | None"]


def is_alive(
    started: Mapping[str, Any], events_file: Path, ask: Alive | None = None
) -> bool | None:
    """Whether the attempt of a ``started`` event lives; ``None`` if that cannot be told from here.

    On the same machine the lock on the cell's events decides: the attempt and all it started hold
    it, and the kernel releases it when the last of them is gone, so that neither a reused process
    id nor a container's own process ids mislead.
    """
    if started.get("host") != socket.gethostname():
        return ask(started) if ask else None
    locked = _is_locked(events_file)
    return _process_exists(started.get("pid")) if locked is None else locked


def _is_locked(path: Path) -> bool | None:
    """Whether somebody holds the lock; ``None`` where the filesystem has no locks."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        # Shared, so that several people can look at once. An attempt that starts in this very
        # moment finds the file locked and tries again.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    finally:
        os.close(descriptor)
    return False


def _process_exists(pid: object) -> bool | None:
    if not isinstance(pid, int) or pid <= 0:
        return None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
