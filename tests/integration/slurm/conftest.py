"""The command line on a login node of a real Slurm."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.fixtures import SlurmCluster
from tests.conftest import Hpcml

SITE: dict[str, Any] = {
    "name": "cluster",
    "scheduler": "slurm",
    "signal": {"name": "USR1", "lead": "30s"},
}


class LoginNode(Hpcml):
    """hpcml in a folder that the nodes see, for the site ``cluster``; runs lie in ``runs``."""

    def __init__(self, folder: Path, cluster: SlurmCluster) -> None:
        super().__init__(folder)
        self.cluster = cluster
        self.environment["HPCML_SITE"] = "cluster"
        self.site()

    def site(self, **slurm: Any) -> None:
        """Write the site's file; ``slurm`` are keys of its block of that name."""
        self.write("site_configs/cluster.yaml", yaml.safe_dump({**SITE, "slurm": slurm}))

    def recipe(self, name: str, run: list[str], values: list[Any], **keys: Any) -> Path:
        """A recipe that runs a program once for each value of ``params.n``."""
        document = {
            "name": name,
            "kind": "command",
            "sweep": {"grid": {"n": values}},
            "resources": {"time": "2m", **keys.pop("resources", {})},
            "command": {"run": run},
            **keys,
        }
        return self.write(f"{name}.yaml", yaml.safe_dump(document))

    def wrap(self, command: str, lines: str) -> None:
        """Put a script before a command of Slurm in the PATH; ``$REAL`` is the command itself."""
        path = self.write(f"bin/{command}", f"#!/bin/bash\nREAL={shutil.which(command)}\n{lines}")
        path.chmod(0o755)
        self.environment["PATH"] = f"{path.parent}:{self.environment['PATH']}"

    def unwrap(self) -> None:
        """Take all of :meth:`wrap` away again."""
        shutil.rmtree(self.folder / "bin")

    def journal(self, event: str = "submitted") -> list[dict[str, Any]]:
        """What the journal of the only run says."""
        lines = (self.run_folder() / "submissions.jsonl").read_text().splitlines()
        return [entry for entry in map(json.loads, lines) if entry["event"] == event]

    def jobs(self) -> list[str]:
        """The numbers of all jobs that were submitted for the only run."""
        return [str(entry["job"]) for entry in self.journal()]

    def queue(self) -> list[str]:
        """The states of the tasks of the only run that are queued or running."""
        jobs = set(self.jobs())
        return [
            entry["state"]
            for entry in self.cluster.squeue()
            if entry["id"].partition("_")[0] in jobs
        ]

    def events(self, kind: str) -> dict[str, list[dict[str, Any]]]:
        """The events of a kind, by cell id."""
        found = {}
        for cell in self.cell_dirs():
            lines = (cell / "events.jsonl").read_text().splitlines()
            found[cell.name] = [e for e in map(json.loads, lines) if e["event"] == kind]
        return found

    def states(self) -> list[str]:
        """The cells' states, by index."""
        return [cell["state"] for cell in self.status()["cells"]]

    def reasons(self) -> list[str]:
        """Why the cells are in their states, by index."""
        return [cell["reason"] or "" for cell in self.status()["cells"]]


@pytest.fixture
def login(tmp_path: Path, slurm_cluster: SlurmCluster) -> LoginNode:
    return LoginNode(tmp_path, slurm_cluster)
