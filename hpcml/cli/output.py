"""Output that cannot be written: the disk is full, or whoever read it has left."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO, cast


@contextmanager
def no_reason_to_stop() -> Iterator[None]:
    """Within the block what cannot be written is lost, and the work goes on."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (cast(TextIO, stream and _Lenient(stream)) for stream in before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, _Lenient):
                stream.end()
        sys.stdout, sys.stderr = before


def discard(stream: TextIO) -> None:
    """Lose what ``stream`` still holds, which Python would try to write when it ends."""
    with suppress(OSError, ValueError):
        descriptor = os.open(os.devnull, os.O_WRONLY)
        os.dup2(descriptor, stream.fileno())
        os.close(descriptor)


class _Lenient:
    """A stream whose errors are told once, on standard error, and else passed over."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._told = False

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            self._tell(error)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            self._tell(error)

    def end(self) -> None:
        """Write what is left, if that is possible."""
        try:
            self._stream.flush()
        except OSError:
            discard(self._stream)

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            with suppress(OSError):
                message = f"hpcml: output cannot be written ({error.strerror}); the cells go on\n"
                os.write(2, message.encode())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
