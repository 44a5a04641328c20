"""What tests of several levels share: the command line as a person uses it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

pytest_plugins = ["tests.cluster.fixtures"]

# Nothing here is about time, and a machine may be busy.
settings.register_profile("patient", deadline=None)
settings.load_profile("patient")

REPOSITORY = Path(__file__).resolve().parents[1]


class Hpcml:
    """The installed command, in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HPCML_")},
            # Whoever has a site for this host in site_configs/ tests here all the same.
            "HPCML_SITE": "local",
            "PYTHONPATH": str(REPOSITORY),
            "COLUMNS": "200",
        }

    def write(self, name: str, text: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def start(self, *arguments: str | Path, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "hpcml", *map(str, arguments)],
            cwd=self.folder,
            env=self.environment,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            **options,
        )

    def __call__(
        self, *arguments: str | Path, code: int | None = 0, timeout: float = 300
    ) -> subprocess.CompletedProcess[str]:
        """Run the command to its end; ``code`` is the exit code it must have (None: any)."""
        process = self.start(*arguments)
        try:
            out, err = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            out, err = process.communicate()
            raise AssertionError(f"still running after {timeout} s\n{out}\n{err}") from None
        assert "Traceback" not in err, err
        if code is not None:
            assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    def status(self, *arguments: str) -> dict[str, Any]:
        document: dict[str, Any] = json.loads(self("status", *arguments, "--json").stdout)
        return document

    def run_folder(self) -> Path:
        (plan,) = self.folder.glob("runs/*/*/plan.json")
        return plan.parent

    def cell_dirs(self) -> list[Path]:
        return sorted(self.run_folder().joinpath("cells").iterdir())


@pytest.fixture
def hpcml(tmp_path: Path) -> Hpcml:
    return Hpcml(tmp_path)


def wait_until(condition: Any, seconds: float = 60, what: str = "it") -> None:
    """Wait until ``condition()`` is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} did not happen in {seconds} s"
        time.sleep(0.02)


def kill_everything_of(process: subprocess.Popen[str]) -> None:
    """SIGKILL the command alone: what it started has to notice."""
    process.send_signal(signal.SIGKILL)
    process.communicate()


def of_folder(folder: Path, word: str) -> list[int]:
    """Processes with ``word`` in their command line that belong to a run in ``folder``."""
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            command = Path("/proc", name, "cmdline").read_bytes().decode(errors="replace")
            environment = Path("/proc", name, "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if word in command and str(folder) in command + environment:
            found.append(int(name))
    return found


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def write_texts(folder: Path) -> str:
    """A small corpus of sentences, the same each time; the pattern of its files."""
    folder.mkdir(parents=True, exist_ok=True)
    chooser = random.Random(7)
    words = ("the", "red", "old", "cat", "dog", "house", "river", "sees", "finds", "and", "while")
    for number in range(60):
        lines = (" ".join(chooser.choices(words, k=9)) for _ in range(40))
        (folder / f"text{number:02}.txt").write_text(".\n".join(lines))
    return str(folder / "*.txt")
