"""Keeping the local scheduler going until nothing is left, and stopping it cleanly."""

from __future__ import annotations

import fcntl
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from hpcml.errors import UserError
from hpcml.files import plain_errors
from hpcml.launch.local import LocalScheduler
from hpcml.runs.find import reference
from hpcml.runs.folder import RunFolder

_POLL_SECONDS = 0.05
_REFRESH_SECONDS = 0.5
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def only_driver(run: RunFolder) -> Iterator[int]:
    """Be the only command that runs the cells of ``run`` here, or submits them.

    The lock ends with the process, however that ends, and with all that it gave the descriptor
    to.

    Yields:
        The descriptor of the lock.

    Raises:
        UserError: another command is at it.
    """
    with plain_errors(f"open {run.path}"):
        descriptor = os.open(run.path / "driver", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with plain_errors(f"lock {run.path / 'driver'}"):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                owner = os.read(descriptor, 20).decode(errors="replace").strip()
                raise UserError(
                    f"{run.path}: another command (process {owner}) is at these cells; "
                    f"look at them by: hpcml watch {reference(run)}"
                ) from None
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        yield descriptor
    finally:
        os.close(descriptor)


def drive(
    scheduler: LocalScheduler, refresh: Callable[[], None], say: Callable[[str], None]
) -> bool:
    """Run the scheduler until it is idle.

    The first INT, TERM or HUP asks the cells to save and leave, the second ends them at once.

    Args:
        scheduler: what has been submitted.
        refresh: called about twice a second, to show the progress.
        say: told what a signal brought about.

    Returns:
        Whether it was interrupted.
    """
    asked: list[int] = []

    def ask(signum: int, frame: FrameType | None) -> None:
        asked.append(signum)

    # What is ignored stays so: under nohup a hang-up is no reason to stop.
    heard = [s for s in _STOP_SIGNALS if signal.getsignal(s) is not signal.SIG_IGN]
    previous = {signum: signal.signal(signum, ask) for signum in heard}
    handled = 0
    next_refresh = 0.0
    try:
        while not scheduler.idle:
            scheduler.poll()
            if len(asked) > handled:
                handled = len(asked)
                if handled == 1:
                    say("stopping: cells save and leave; once more ends them at once")
                    scheduler.stop()
                else:
                    scheduler.kill()
            if time.monotonic() >= next_refresh:
                refresh()
                next_refresh = time.monotonic() + _REFRESH_SECONDS
            time.sleep(_POLL_SECONDS)
        refresh()
    finally:
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    return bool(asked)
