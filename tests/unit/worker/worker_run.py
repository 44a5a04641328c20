"""A run folder made by hand, and the worker as the batch script starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from hpcml.runs.folder import RunFolder

REPOSITORY = Path(__file__).parents[3]


class Run:
    """A run folder with one submission, and the means to run a task of it."""

    def __init__(self, root: Path, programs: list[str], **settings: object) -> None:
        resources = {"nodes": 1, "processes": 1, "cpus": 1, "gpus": 0, "memory": None, "time": None}
        plan = {
            "digest": "d",
            "kind": "command",
            "swept": ["x"],
            "directory": ".",
            "resources": {**resources, **settings.pop("resources", {})},  # type: ignore[dict-item]
            "retry": settings.pop("retry", {"application": 0, "oom": 0, "killed": 0}),
            "needs": settings.pop("needs", []),
            "signal": {"name": "USR1", "lead": settings.pop("lead", 20)},
            "node_mtbf": settings.pop("node_mtbf", 10**6),
        }
        python = [sys.executable, "-c"]
        # One that waits for the program instead of becoming it.
        shell = ["bash", "-c", '"$@"; exit', "-"] if settings.pop("shell", False) else []
        cells = [
            {
                "params": {"x": index},
                "payload": {"argv": [*shell, *python, program], "env": {"LETTER": "ä '$(x)"}},
            }
            for index, program in enumerate(programs)
        ]
        lines = ((f"cell{index}", json.dumps(cell)[1:-1]) for index, cell in enumerate(cells))
        self.folder = RunFolder.create(root, "test", "run", plan, "", "", lines)
        (self.folder.code / "snapshot" / "project").mkdir(parents=True)
        (self.folder.code / "snapshot" / "hpcml").symlink_to(REPOSITORY / "hpcml")
        self.settings = plan
        self.submit(**settings)

    def submit(self, cells: object = None, pack: int = 1, scheduler: str = "local") -> int:
        return self.folder.write_submission(
            {
                "scheduler": scheduler,
                "created": "2020-01-01T00:00:00.000+00:00",
                "cells": cells or [[0, len(self.folder) - 1]],
                "pack": pack,
                "code": "code/snapshot",
                "settings": self.settings,
            }
        )

    def start(
        self, task: int = 0, submission: int = 1, enter: Path | None = None
    ) -> subprocess.Popen[str]:
        """Start the worker, in the control group ``enter`` if one is given."""
        join = ["sh", "-c", 'echo $$ > "$0/cgroup.procs"; exec "$@"', str(enter)] if enter else []
        return subprocess.Popen(
            [
                *join,
                sys.executable,
                "-m",
                "hpcml.worker",
                str(self.folder.path),
                str(submission),
                str(task),
            ],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            text=True,
            stderr=subprocess.PIPE,
        )

    def run(self, task: int = 0, submission: int = 1) -> int:
        process = self.start(task, submission)
        _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors, errors
        return process.returncode

    def events(self, index: int = 0, kind: str | None = None) -> list[dict]:
        path = self.folder.cell_dir(f"cell{index}") / "events.jsonl"
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return [event for event in events if kind is None or event["event"] == kind]

    def wait_for_start(self, attempt: int) -> None:
        """Wait until the first cell's attempt has begun."""
        path = self.folder.cell_dir("cell0") / "events.jsonl"
        deadline = time.monotonic() + 20
        while not path.exists() or len(self.events(kind="started")) < attempt:
            assert time.monotonic() < deadline, "it did not start"
            time.sleep(0.02)

    def wait_for_step(self, index: int = 0, step: int = 1) -> None:
        path = self.folder.cell_dir(f"cell{index}") / "metrics.jsonl"
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            if path.exists() and f'"step":{step},' in path.read_text():
                return
            time.sleep(0.02)
        raise AssertionError("the payload did not get that far")
