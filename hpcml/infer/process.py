"""The engine in a process of its own, which may die without taking anything with it."""

from __future__ import annotations

import os
import pickle
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from multiprocessing.connection import Connection

from hpcml.infer.engine import Answer, EngineConfig, EngineError, Request, make_engine
from hpcml.infer.job import InferenceError
from hpcml.worker.processes import die_with_parent, kill_group

_CLOSE_SECONDS = 10.0


class EngineDied(Exception):
    """The engine's process is gone; the message says how it ended."""


class EngineProcess:
    """An engine in another process. It is starting when this has been made.

    Args:
        config: which engine.
    """

    def __init__(self, config: EngineConfig) -> None:
        self.ready = False
        self.limit = 1
        mine, other = socket.socketpair()
        self._connection = Connection(mine.detach())
        with other:
            self._process = subprocess.Popen(
                [sys.executable, "-u", "-m", "hpcml.infer.process", str(other.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=sys.stderr,
                pass_fds=[other.fileno(), *_inheritable()],
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._connection.send(config)

    def poll(self, timeout: float) -> list[Answer]:
        """Wait for answers, not longer than ``timeout`` seconds.

        Raises:
            EngineDied: the process is gone.
            InferenceError: it cannot be made as it was asked.
        """
        answers: list[Answer] = []
        try:
            while self._connection.poll(0.0 if answers else timeout):
                message = self._connection.recv()
                if isinstance(message, InferenceError):
                    raise message
                if isinstance(message, dict):
                    self.limit = message["limit"]
                    self.ready = True
                    break
                answers += message
        except (EOFError, ConnectionError, pickle.UnpicklingError):
            if answers:
                return answers  # the next call tells
            raise EngineDied(self._end()) from None
        return answers

    def send(self, requests: Sequence[Request]) -> None:
        """Hand over questions.

        Raises:
            EngineDied: the process is gone.
        """
        try:
            self._connection.send(requests)
        except OSError:
            raise EngineDied(self._end()) from None

    def close(self) -> None:
        """End the process, and whatever it started."""
        self._connection.close()
        kill_group(self._process.pid)
        self._process.wait()

    def _end(self) -> str:
        try:
            code = self._process.wait(_CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            code = None
        self.close()
        return f"signal {-code}" if code is not None and code < 0 else f"exit code {code}"


def _inheritable() -> list[int]:
    """Descriptors that the worker gave: while one of its processes lives, it holds the lock."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        try:
            if descriptor > 2 and os.get_inheritable(descriptor):
                found.append(descriptor)
        except OSError:
            continue
    return found


def main() -> None:
    """The other process: make the engine, then answer until nobody asks any more."""
    connection = Connection(int(sys.argv[1]))
    try:
        config = connection.recv()
        engine = make_engine(config)
    except EngineError as error:
        connection.send(InferenceError(str(error)))
        return
    connection.send({"limit": engine.limit})
    # A thread takes what comes, since the one who asks must never wait for an engine that waits
    # to answer.
    questions: queue.SimpleQueue[Sequence[Request] | None] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, questions), daemon=True).start()
    open_rows = 0
    while True:
        answers: list[Answer] = []
        while not questions.empty() or not open_rows:
            requests = questions.get()
            if requests is None:
                return
            open_rows += len(requests)
            answers += engine.add(requests)
        answers += engine.step()
        open_rows -= len(answers)
        if answers:
            try:
                connection.send(answers)
            except OSError:
                return


def _read(connection: Connection, questions: queue.SimpleQueue[Sequence[Request] | None]) -> None:
    try:
        while True:
            questions.put(connection.recv())
    except (EOFError, OSError):
        questions.put(None)


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # an orderly end of an engine takes long, and there is nothing to save
