"""The command ``hpcml``, and ``python -m hpcml``: from here on Ctrl-C is never a traceback."""

from __future__ import annotations

import gc
import os
import signal
import sys
from contextlib import suppress
from types import FrameType
from typing import NoReturn


def main() -> None:
    """Run the command line, and end the process."""
    # Nearly all that a short command makes stays: modules, models, cells.
    gc.set_threshold(50_000)
    # Where nobody may interrupt (in the background of a script) that is left as it is.
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if interruptible:
        signal.signal(signal.SIGINT, _leave)
    _open_streams()
    from hpcml import cli  # takes longer than everything before

    try:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        code = cli.main()
        if interruptible:
            signal.signal(signal.SIGINT, _leave)
    except KeyboardInterrupt:
        _leave()
    _end(code)


def _leave(signum: int = signal.SIGINT, frame: FrameType | None = None) -> NoReturn:
    """End at once: nothing has begun yet, or all is done."""
    try:
        os.write(2, b"hpcml: interrupted\n")
    finally:
        os._exit(130)


def _end(code: int) -> NoReturn:
    """End without taking apart first, object by object, what a large sweep has made."""
    for stream in (sys.stdout, sys.stderr):
        # What cannot be written was told before; a stream that was closed is None.
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()
    os._exit(code)


def _open_streams() -> None:
    """Have all three standard streams, so that no file of ours gets the number of one."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # For reading only: what is written to a closed stream is an error, not lost.
            os.open(os.devnull, os.O_RDONLY)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)


if __name__ == "__main__":
    main()
