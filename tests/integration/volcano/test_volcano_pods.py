"""What the pods of a job do: their own script, with the real worker, as a node would start it.

The server is a small one in this process, and this test is its kubelet.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcml.launch.submit import create_run, next_submission, submit_to_volcano
from hpcml.plan import compile_plan
from hpcml.recipe.load import load_recipe
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import collect
from hpcml.site.search import load_site
from tests.volcano_server import VolcanoServer

PROGRAM = """
import json, os, pathlib, signal, sys, time

cell = pathlib.Path(os.environ["HPCML_CELL_DIR"])
names = ("RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "HPCML_ATTEMPT")
seen = {name: os.environ[name] for name in names}
(cell / f"seen.{os.environ['RANK']}.{os.environ['HPCML_ATTEMPT']}").write_text(json.dumps(seen))
what = sys.argv[1]
if what == "fail":
    sys.exit(3)
if what == "wait" and os.environ["HPCML_ATTEMPT"] == "1":
    def leave(signum, frame):
        (cell / "checkpoints" / "step-1").mkdir()
        sys.exit(75)
    signal.signal(signal.SIGTERM, leave)
    signal.signal(signal.SIGUSR1, leave)
    (cell / f"waits.{os.environ['RANK']}").touch()
    while True:
        time.sleep(0.02)
"""


@pytest.fixture
def server() -> Iterator[VolcanoServer]:
    found = VolcanoServer()
    yield found
    found.stop()


class Pods:
    """A run on the server, whose pods are processes of this machine."""

    def __init__(self, folder: Path, server: VolcanoServer, recipe: str) -> None:
        self.server = server
        (folder / "program.py").write_text(PROGRAM)
        site = folder / "site.yaml"
        site.write_text(
            f"name: kube\nscheduler: volcano\npython: {sys.executable}\n"
            f"volcano:\n  namespace: ml\n  kubeconfig: {server.kubeconfig(folder)}\n"
            f"  image: x\n  volumes: [{{path: {folder}, claim: shared}}]\n"
        )
        path = folder / "recipe.yaml"
        path.write_text(
            "name: some\nkind: command\n"
            f"command: {{run: [{sys.executable}, program.py, '{{{{ params.what }}}}']}}\n{recipe}"
        )
        plan = compile_plan(load_recipe(path), load_site(site), folder / "runs")
        self.run: RunFolder = create_run(plan)
        self.jobs = submit_to_volcano(next_submission(plan), self.run)

    def start(self, index: int, job: int = 0, version: int = 0) -> subprocess.Popen[bytes]:
        """Start a pod as a node does: its container's command, its environment and no more."""
        name = self.jobs[job]
        task = self.server.jobs[name]["spec"]["tasks"][0]
        pod = f"{name}-{task['name']}-{index}"
        fields = {
            "metadata.name": pod,
            "metadata.annotations['volcano.sh/job-version']": str(version),
        }
        (container,) = task["template"]["spec"]["containers"]
        environment = {"PATH": os.environ["PATH"], "VC_TASK_INDEX": str(index)}
        if task["name"] == "node":
            environment["VC_NODE_HOSTS"] = ",".join(["127.0.0.1"] * task["replicas"])
        for variable in container["env"]:
            environment[variable["name"]] = (
                fields[variable["valueFrom"]["fieldRef"]["fieldPath"]]
                if "valueFrom" in variable
                else _expanded(variable["value"], environment)
            )
        command = [_expanded(word, environment) for word in container["command"]]
        return subprocess.Popen(command, env=environment, cwd="/", stdin=subprocess.DEVNULL)

    def states(self) -> list[str]:
        cells = collect(self.run).cells
        return [cells[index].state for index in sorted(cells)]

    def cell(self, index: int) -> Path:
        return self.run.cell_dir(self.run.cell(index)["id"])

    def seen(self, cell: int, rank: int = 0, attempt: int = 1) -> dict[str, Any]:
        text = (self.cell(cell) / f"seen.{rank}.{attempt}").read_text()
        return dict(json.loads(text))


def _expanded(text: str, environment: dict[str, str]) -> str:
    """As Kubernetes replaces $(NAME), and takes $$ for a dollar."""
    return re.sub(
        r"\$\$|\$\((\w+)\)",
        lambda found: "$" if found[0] == "$$" else environment.get(found[1], found[0]),
        text,
    )


def until(condition: Callable[[], object], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.05)


def test_a_pod_runs_the_tasks_of_its_lane(tmp_path: Path, server: VolcanoServer) -> None:
    """Two lanes for five cells, one of which fails: the others of its lane run all the same."""
    pods = Pods(
        tmp_path,
        server,
        "sweep: {grid: {what: [ok, fail], n: [0, 1]}}\narray: {max_running: 2}\n",
    )
    first, second = pods.start(0), pods.start(1)
    assert (first.wait(60), second.wait(60)) == (1, 1)
    assert pods.states() == ["done", "done", "failed", "failed"]
    # What began is known by the pod's name, and the script's own output lies under it.
    events = (pods.cell(3) / "events.jsonl").read_text()
    assert json.loads(events.split("\n")[0])["job"] == f"{pods.jobs[0]}-task-1"
    assert (pods.run.tasks / f"001.{pods.jobs[0]}-task-1.err").read_text() == ""
    assert pods.seen(0)["WORLD_SIZE"] == "1"


def test_a_pod_that_is_asked_to_leave_comes_back(tmp_path: Path, server: VolcanoServer) -> None:
    """TERM saves the running cell; the next pod continues it and runs what is left."""
    pods = Pods(
        tmp_path,
        server,
        "sweep: {grid: {what: [ok, wait, done]}}\narray: {max_running: 1}\n",
    )
    pod = pods.start(0)
    until((pods.cell(1) / "waits.0").exists)
    pod.send_signal(signal.SIGTERM)
    assert pod.wait(60) == 75
    assert pods.states() == ["done", "stopped"]
    assert pods.start(0).wait(60) == 0
    assert pods.states() == ["done", "done", "done"]
    assert pods.seen(1, attempt=2)["HPCML_ATTEMPT"] == "2"
    assert not (pods.cell(0) / "seen.0.2").exists()


def test_the_pods_of_a_gang_are_the_nodes_of_a_cell(tmp_path: Path, server: VolcanoServer) -> None:
    pods = Pods(
        tmp_path,
        server,
        "params: {what: wait}\nresources: {nodes: 2, processes: 2}\n",
    )
    gang = [pods.start(0), pods.start(1)]
    until(lambda: all((pods.cell(0) / f"waits.{rank}").exists() for rank in range(4)))
    for pod in gang:
        pod.send_signal(signal.SIGTERM)
    leader, follower = [pod.wait(90) for pod in gang]
    assert leader == 75
    assert follower in (0, 75)
    assert pods.states() == ["stopped"]
    # Volcano restarts the whole job, and its version is another one.
    gang = [pods.start(1, version=1), pods.start(0, version=1)]
    assert [pod.wait(90) for pod in gang] == [0, 0]
    assert pods.states() == ["done"]
    found = [pods.seen(0, rank, attempt=2) for rank in range(4)]
    assert [seen["NODE_RANK"] for seen in found] == ["0", "0", "1", "1"]
    assert {seen["WORLD_SIZE"] for seen in found} == {"4"}
    assert {seen["MASTER_ADDR"] for seen in found} == {"127.0.0.1"}
    assert len({seen["MASTER_PORT"] for seen in found}) == 1
