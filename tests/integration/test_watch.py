"""`hpcml watch` in a terminal of its own."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyte
import pytest

from tests.conftest import Hpcml, wait_until

RECIPE = """
name: t
kind: command
sweep: {grid: {a: [1, 2]}}
objective: {metric: loss, mode: min}
command:
  run:
  - sh
  - -c
  - |
    for i in 1 2 3 4; do
      printf '{"step": %d, "total_steps": 9, "loss": %d}\\n' $i $((9-i)) >> $HPCML_METRICS
    done
    until [ -e "$GO" ]; do sleep 0.1; done
env: {GO: GO_FILE}
resources: {cpus: 1}
"""


class Terminal:
    """A program in a pseudo-terminal, and what is on its screen."""

    def __init__(self, descriptor: int, pid: int, columns: int, lines: int) -> None:
        self._descriptor = descriptor
        self._pid = pid
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self.written = b""

    def resize(self, columns: int, lines: int) -> None:
        size = struct.pack("HHHH", lines, columns, 0, 0)
        fcntl.ioctl(self._descriptor, termios.TIOCSWINSZ, size)
        self._screen.resize(lines, columns)

    def read(self) -> bool:
        """Take what is there; whether the program goes on."""
        ready, _, _ = select.select([self._descriptor], [], [], 0.1)
        if ready:
            try:
                data = os.read(self._descriptor, 65536)
            except OSError:
                return False
            self.written += data
            self._stream.feed(data)
        return True

    def wait_for(self, condition: Callable[[list[str]], bool], seconds: float = 60) -> list[str]:
        """Read until the screen is as it should be."""
        deadline = time.monotonic() + seconds
        while not condition(self._screen.display):
            assert time.monotonic() < deadline, "\n".join(self._screen.display)
            assert self.read(), self.written
        return list(self._screen.display)

    def type(self, keys: bytes) -> None:
        os.write(self._descriptor, keys)

    def kill(self, signum: int) -> None:
        os.kill(self._pid, signum)

    def end(self, seconds: float = 60) -> int:
        """Read to the end; the exit code."""
        deadline = time.monotonic() + seconds
        while self.read():
            assert time.monotonic() < deadline, "\n".join(self._screen.display)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


@contextmanager
def terminal(
    hpcml: Hpcml, *arguments: str, columns: int = 80, lines: int = 24, **environment: str
) -> Iterator[Terminal]:
    variables = {**hpcml.environment, "TERM": "xterm-256color", **environment}
    variables = {k: v for k, v in variables.items() if k not in ("COLUMNS", "LINES")}
    pid, descriptor = pty.fork()
    if pid == 0:
        os.chdir(hpcml.folder)
        os.execvpe(sys.executable, [sys.executable, "-m", "hpcml", *arguments], variables)
    found = Terminal(descriptor, pid, columns, lines)
    found.resize(columns, lines)
    try:
        yield found
    finally:
        os.close(descriptor)


@pytest.fixture
def go(hpcml: Hpcml) -> Iterator[Path]:
    """Two cells that wait until this file is there."""
    path = hpcml.folder / "go"
    hpcml.write("recipe.yaml", RECIPE.replace("GO_FILE", str(path)))
    sweep = hpcml.start("sweep", "recipe.yaml")
    try:
        wait_until(lambda: len(list(hpcml.folder.glob("runs/*/*/cells/*/metrics.jsonl"))) == 2)
        yield path
    finally:
        path.touch()
        sweep.communicate(timeout=60)


def test_a_run_is_watched_to_its_end(hpcml: Hpcml, go: Path) -> None:
    with terminal(hpcml, "watch", NO_COLOR="1") as screen:
        screen.wait_for(
            lambda lines: (
                lines[0].startswith("t  ")
                and lines[2].startswith("2 cells: 2 running")
                and all(part in "\n".join(lines) for part in ("best so far, lowest loss", "█▆▃▁"))
            )
        )
        screen.resize(40, 12)
        # A picture may come in pieces.
        screen.wait_for(
            lambda lines: (
                lines[1].rstrip() == "▓" * 40
                and any(line.startswith("running: 2") for line in lines)
                and all(line.strip() == "" for line in lines[11:])
            )
        )
        go.touch()
        assert screen.end() == 0
        written = screen.written.decode()
    # Without colours, on a screen that it leaves with the cursor on; the summary comes after it.
    assert "\x1b[3" not in written.replace("\x1b[39m", "")
    _, _, after = written.rpartition("\x1b[?1049l")
    assert "\x1b[?25h" in written
    assert "2 cells: 2 done" in re.sub(r"\x1b\[[0-9;]*m", "", after)


def test_ctrl_c_ends_the_looking_alone(hpcml: Hpcml, go: Path) -> None:
    with terminal(hpcml, "watch", "t") as screen:
        screen.wait_for(lambda lines: "2 cells: 2 running" in lines[2])
        screen.type(b"\x03")
        assert screen.end() == 130
        written = screen.written.decode()
    _, _, after = written.rpartition("\x1b[?1049l")
    assert "the cells go on" in after
    assert "Traceback" not in written
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert {cell["state"] for cell in hpcml.status()["cells"]} == {"running"}


def test_one_that_is_ended_leaves_the_terminal_clean(hpcml: Hpcml, go: Path) -> None:
    with terminal(hpcml, "status", "t", "--watch") as screen:
        screen.wait_for(lambda lines: "2 cells: 2 running" in lines[2])
        screen.kill(signal.SIGTERM)
        assert screen.end() == 128 + signal.SIGTERM
        written = screen.written.decode()
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert written.rindex("\x1b[?1049l") > written.rindex("\x1b[?1049h")
