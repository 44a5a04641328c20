"""Submitting to a genuine Volcano, following, gangs, restarts, eviction, failure, cancelling.

Needs a server with Volcano and nodes that have ``nvidia.com/gpu``: ``HPCML_TEST_KUBECONFIG`` names
the file that says where it is. The nodes' kubelet may be a stand-in that pulls no image: a pod
with the annotation `EXIT_CODE` ends with that code a moment after it began, and one without it
runs until it is deleted.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcml.launch.submit import create_run, next_submission, submit_to_volcano
from hpcml.launch.volcano.client import Cluster, VolcanoError
from hpcml.launch.volcano.states import VolcanoWatcher
from hpcml.launch.watch import follow, watch
from hpcml.plan import compile_plan
from hpcml.plan.volcano import job_name
from hpcml.recipe.load import load_recipe
from hpcml.render import parse_job, render_job
from hpcml.runs.cancel import cancel_cell
from hpcml.runs.status import Status
from hpcml.site.search import load_site

#: What the stand-in kubelet looks for on a pod.
EXIT_CODE = "hpcml-test/exit-code"

SECONDS = 180.0

KUBECONFIG = os.environ.get("HPCML_TEST_KUBECONFIG")

pytestmark = [
    pytest.mark.volcano_cluster,
    pytest.mark.skipif(
        not KUBECONFIG,
        reason="HPCML_TEST_KUBECONFIG names no server of Kubernetes with Volcano",
    ),
]


class Run:
    """A run on the server."""

    def __init__(self, folder: Path, recipe: str, code: int | None, site: str = "") -> None:
        annotations = "" if code is None else f"  annotations: {{{EXIT_CODE}: '{code}'}}\n"
        (folder / "site.yaml").write_text(
            f"name: kube\nscheduler: volcano\npython: python3\nsignal: {{lead: 1s}}\n"
            f"volcano:\n  kubeconfig: {KUBECONFIG}\n  image: registry.example.org/none:1\n"
            f"  volumes: [{{path: {folder}, host_path: {folder}}}]\n{annotations}{site}"
        )
        (folder / "recipe.yaml").write_text(
            f"name: test\nkind: command\ncommand: {{run: ['true']}}\n{recipe}"
        )
        found = load_site(folder / "site.yaml")
        self.plan = compile_plan(load_recipe(folder / "recipe.yaml"), found, folder / "runs")
        self.cluster = Cluster(self.plan.site.volcano.model_dump())
        self.folder = create_run(self.plan)
        self.jobs: list[str] = []

    def submit(self) -> list[str]:
        self.jobs = submit_to_volcano(next_submission(self.plan), self.folder)
        return self.jobs

    def watcher(self) -> VolcanoWatcher:
        watcher = watch(self.folder)
        assert isinstance(watcher, VolcanoWatcher)
        watcher.ask()
        assert watcher.trouble is None
        return watcher

    def status(self) -> Status:
        return self.watcher().refresh()

    def follow(self) -> Status:
        """To the end, asking more often than people should."""
        watcher = self.watcher()
        end = time.monotonic() + SECONDS

        def show(status: Status) -> None:
            assert time.monotonic() < end, status
            watcher._asked = float("-inf")

        return follow(watcher, show, pytest.fail)

    def pods(self) -> dict[str, dict[str, Any]]:
        pods = [pod for job in self.jobs for pod in self.cluster.pods(f"volcano.sh/job-name={job}")]
        return {pod["metadata"]["name"]: pod for pod in pods}

    def running(self, count: int) -> dict[str, dict[str, Any]]:
        """Wait until so many pods run."""

        def look() -> dict[str, dict[str, Any]] | None:
            pods = {
                name: pod
                for name, pod in self.pods().items()
                if pod["status"].get("phase") == "Running"
                and "deletionTimestamp" not in pod["metadata"]
            }
            return pods if len(pods) == count else None

        return until(look)

    def phase(self, job: int = 0) -> str | None:
        found = self.cluster.job(self.jobs[job])
        assert found is not None
        return ((found.get("status") or {}).get("state") or {}).get("phase")


def until(look: Callable[[], Any]) -> Any:
    end = time.monotonic() + SECONDS
    while not (found := look()):
        assert time.monotonic() < end, "it took too long"
        time.sleep(0.5)
    return found


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    runs: list[Run] = []

    def new(recipe: str, code: int | None = None, site: str = "") -> Run:
        folder = tmp_path / str(len(runs))
        folder.mkdir()
        runs.append(Run(folder, recipe, code, site))
        return runs[-1]

    yield new
    for run in runs:
        for job in run.jobs:
            run.cluster.delete(job)


Make = Callable[..., Run]


def test_it_is_followed_to_its_end(make: Make) -> None:
    run = make("sweep: {grid: {n: [0, 1, 2]}}\n", code=0)
    (name,) = run.submit()
    status = run.follow()
    # Nothing really ran, so there is a reason and no result.
    assert len(status.in_state("lost")) == 3
    assert all("exit code 0" in str(cell.reason) for cell in status.cells.values())
    until(lambda: run.phase() == "Completed")
    assert set(run.pods()) <= {f"{name}-task-{index}" for index in range(3)}
    # What the worker finds its task and its name by.
    for index in range(3):
        pod = run.pods()[f"{name}-task-{index}"]
        env = {entry["name"]: entry for entry in pod["spec"]["containers"][0]["env"]}
        assert env["VC_TASK_INDEX"]["value"] == str(index)
        assert pod["spec"]["schedulerName"] == "volcano"


def test_a_gang_starts_together(make: Make) -> None:
    run = make("resources: {nodes: 2, gpus: 1}\n")
    (name,) = run.submit()
    pods = run.running(2)
    assert set(pods) == {f"{name}-node-0", f"{name}-node-1"}
    for pod in pods.values():
        assert pod["spec"]["nodeName"]
        assert pod["spec"]["hostname"] == pod["metadata"]["name"]
        assert pod["spec"]["subdomain"] == name
        # By which the nodes of one start of the job know each other.
        assert "volcano.sh/job-version" in pod["metadata"]["annotations"]
        names = {entry["name"] for entry in pod["spec"]["containers"][0]["env"]}
        assert {"VC_NODE_HOSTS", "VC_TASK_INDEX", "HPCML_LAUNCH"} <= names
    assert run.status().cells[0].reason == "starts"


def test_a_gang_that_does_not_fit_has_no_pod_on_a_node(make: Make) -> None:
    run = make("resources: {nodes: 400, gpus: 1}\n")
    run.submit()
    until(lambda: run.phase() == "Pending")
    time.sleep(5)
    assert not [pod for pod in run.pods().values() if pod["spec"].get("nodeName")]
    cell = run.status().cells[0]
    assert cell.state == "pending"
    assert "waits for room for its 400 pods at once" in str(cell.reason)


def test_75_starts_the_pod_again(make: Make) -> None:
    run = make("sweep: {grid: {n: [0, 1]}}\n", code=75)
    (name,) = run.submit()
    first: dict[str, set[str]] = {f"{name}-task-0": set(), f"{name}-task-1": set()}

    def all_came_back() -> bool:
        for pod_name, pod in run.pods().items():
            first[pod_name].add(pod["metadata"]["uid"])
        return all(len(uids) >= 3 for uids in first.values())

    until(all_came_back)
    assert run.phase() not in ("Completed", "Failed", "Terminated", "Aborted")
    assert run.status().counts() == {"pending": 2}


def test_75_starts_a_gang_again(make: Make) -> None:
    run = make("resources: {nodes: 2}\n", code=75)
    (name,) = run.submit()

    def count() -> bool:
        job = run.cluster.job(name)
        assert job is not None
        return int((job.get("status") or {}).get("retryCount") or 0) >= 2

    until(count)
    assert run.status().counts() == {"pending": 1}


def test_a_pod_that_is_evicted_comes_back(make: Make) -> None:
    run = make("sweep: {grid: {n: [0, 1]}}\n")
    (name,) = run.submit()
    before = run.running(2)
    pod = f"{name}-task-1"
    run.cluster._core.delete_namespaced_pod(pod, run.cluster.namespace, _preload_content=False)
    until(lambda: (found := run.pods().get(pod)) and _uid(found) != _uid(before[pod]))
    after = run.running(2)
    # The other one was left alone.
    other = f"{name}-task-0"
    assert _uid(after[other]) == _uid(before[other])


def test_a_failure_is_the_end_of_its_cells_alone(make: Make) -> None:
    run = make("sweep: {grid: {n: [0, 1]}}\n", code=3)
    run.submit()
    status = run.follow()
    assert status.counts() == {"lost": 2}
    assert all("exit code 3" in str(cell.reason) for cell in status.cells.values())
    until(lambda: run.phase() == "Failed")
    assert len(next_submission(run.plan).indices) == 2


def test_a_gang_ends_with_the_pod_that_failed(make: Make) -> None:
    run = make("resources: {nodes: 2}\n", code=3)
    run.submit()
    assert run.follow().counts() == {"lost": 1}
    until(lambda: run.phase() in ("Failed", "Terminated"))


def test_cancelling_ends_the_pods(make: Make) -> None:
    run = make("sweep: {grid: {n: [0, 1]}}\n")
    (name,) = run.submit()
    run.running(2)
    watcher = run.watcher()
    status = watcher.refresh()
    for index in (0, 1):
        cancel_cell(run.folder, run.folder.cell(index)["id"])
    assert watcher.remove(status, {0, 1}) is None
    until(lambda: run.cluster.job(name) is None and not run.pods())


def test_the_cap_holds(make: Make) -> None:
    run = make("sweep: {grid: {n: [0, 1, 2, 3, 4]}}\narray: {max_running: 2}\n")
    run.submit()
    run.running(2)
    time.sleep(5)
    assert len(run.pods()) == 2


def test_what_the_server_and_the_webhook_say_of_large_and_nasty_jobs(make: Make) -> None:
    run = make(f"sweep: {{grid: {{n: {list(range(1000))}}}}}\n")
    submission = next_submission(run.plan)
    (job,) = submission.jobs
    manifest = parse_job(render_job(submission, job))
    run.cluster.create(manifest, dry_run=True)
    for name in ("x" * 200, "1._-" * 50):
        manifest["metadata"]["name"] = job_name(name, "0123abcd", Path("/runs"), "1-0")
        run.cluster.create(manifest, dry_run=True)
    manifest["metadata"]["annotations"]["note"] = "'\"`$(x)${x}\\\n\t: # {{ a }} é"
    run.cluster.create(manifest, dry_run=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("policies", [{"event": "PodFailed", "action": "Explode"}]),
        ("policies", [{"event": "PodFailed", "action": "RestartJob"}] * 2),
        ("minAvailable", 3),
        ("queue", "there-is-no-such-queue"),
        ("minavailable", 1),
    ],
)
def test_what_the_server_and_the_webhook_refuse(make: Make, key: str, value: Any) -> None:
    run = make("")
    submission = next_submission(run.plan)
    (job,) = submission.jobs
    manifest = parse_job(render_job(submission, job))
    run.cluster.create(manifest, dry_run=True)
    manifest["spec"][key] = value
    with pytest.raises(VolcanoError):
        run.cluster.create(manifest, dry_run=True)


def _uid(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["uid"])
