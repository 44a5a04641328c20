"""Being asked to stop: by USR1, by TERM, or by a file that appears."""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
from pathlib import Path
from types import FrameType

from hpcml.worker.codes import AGAIN

_SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
_FILE_CHECK_SECONDS = 1.0


class StopRequest:
    """Notices requests to stop, at once and at no cost for the training loop.

    A thread waits for signals and looks for the file once a second. A handler in Python alone
    would not do: it runs only between two instructions of the main thread, which may sit in a
    long import, or wait for another rank.

    Before :meth:`hold`, nothing is there that is not on disk already, so a request ends the
    process immediately, with the exit code 75. After it, :attr:`requested` tells the training.

    Args:
        stop_file: the file to look for, or None.
    """

    def __init__(self, stop_file: Path | None) -> None:
        self._file = stop_file
        self._reason: str | None = None
        self._held = False
        self._lock = threading.Lock()

    @property
    def requested(self) -> bool:
        """Whether somebody asked."""
        return self._reason is not None

    @property
    def reason(self) -> str | None:
        """Who asked: ``USR1``, ``TERM`` or ``stop file``."""
        return self._reason

    def install(self) -> None:
        """Start to listen. To be called from the main thread, before anything slow."""
        receiver, sender = socket.socketpair()
        sender.setblocking(False)
        for number in _SIGNALS:
            signal.signal(number, _ignore)
        signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
        self._sockets = (receiver, sender)  # closed when the process ends
        threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()

    def hold(self) -> None:
        """From now on, leave the end to the training, which has something to save."""
        with self._lock:
            self._held = True
            if self._reason is not None:
                # It came while this was called; the thread is about to see to it.
                self._leave()

    def request(self, reason: str) -> None:
        """Ask to stop, as a signal or the file does."""
        with self._lock:
            if self._reason is None:
                self._reason = reason
                if not self._held:
                    self._leave()

    def _leave(self) -> None:
        print(f"asked to stop ({self._reason}) before the first step", file=sys.stderr, flush=True)
        os._exit(AGAIN)

    def _watch(self, receiver: socket.socket) -> None:
        while True:
            ready, _, _ = select.select([receiver], [], [], _FILE_CHECK_SECONDS)
            if ready:
                for number in receiver.recv(64):
                    if number in _SIGNALS:
                        self.request(signal.Signals(number).name[3:])
            elif self._file is not None and self._file.exists():
                self.request("stop file")
            # A request is for good, but the signals must still be drained.


def _ignore(number: int, frame: FrameType | None) -> None:
    """Keep the signal from ending the process; the thread gets its number."""
