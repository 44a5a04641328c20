from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

PROGRAM = """
import sys, time, os, signal
from pathlib import Path
from hpcml.train.stop import StopRequest
stop = StopRequest(Path(sys.argv[1]))
stop.install()
if "hold" in sys.argv:
    stop.hold()
print("ready", flush=True)
if "busy" in sys.argv:  # never back in the interpreter's loop: handlers in Python don't run
    import ctypes; ctypes.CDLL(None).pause(); ctypes.CDLL(None).sleep(30)
end = time.monotonic() + 30
while not stop.requested and time.monotonic() < end:
    time.sleep(0.01)
print(stop.reason, flush=True)
"""


def start(stop_file: Path, *words: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(stop_file), *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


@pytest.mark.parametrize(("number", "name"), [(10, "USR1"), (15, "TERM")])
def test_a_signal_is_noticed(tmp_path: Path, number: int, name: str) -> None:
    process = start(tmp_path / "stop", "hold")
    process.send_signal(number)
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == (f"{name}\n", 0)


def test_the_file_is_noticed(tmp_path: Path) -> None:
    process = start(tmp_path / "stop", "hold")
    (tmp_path / "stop").touch()
    output, _ = process.communicate(timeout=30)
    assert (output, process.returncode) == ("stop file\n", 0)


def test_before_there_is_anything_to_save_it_ends_at_once(tmp_path: Path) -> None:
    process = start(tmp_path / "stop", "busy")
    sent = time.monotonic()
    process.send_signal(15)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 75
    assert time.monotonic() - sent < 2
    assert "before the first step" in errors
