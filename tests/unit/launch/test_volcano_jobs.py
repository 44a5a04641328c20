"""Submitting to Volcano and looking at it, through the real client and a small server."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.launch.cluster import PartlySubmitted
from hpcml.launch.journal import read_journal
from hpcml.launch.submit import (
    create_run,
    left_before,
    next_submission,
    settle,
    submit_to_volcano,
)
from hpcml.launch.volcano.client import Cluster, VolcanoError
from hpcml.launch.volcano.states import VolcanoWatcher
from hpcml.launch.watch import follow, watch
from hpcml.plan import Plan, Snapshot, compile_plan, compile_stages
from hpcml.plan.snapshot import take
from hpcml.recipe.load import load_recipe, load_stages
from hpcml.runs.cancel import cancel_cell
from hpcml.runs.folder import RunFolder
from hpcml.site.search import load_site
from tests.volcano_server import VolcanoServer


@pytest.fixture
def server() -> Iterator[VolcanoServer]:
    found = VolcanoServer()
    yield found
    found.stop()


@pytest.fixture(scope="module")
def code(tmp_path_factory: pytest.TempPathFactory) -> Snapshot:
    return take(tmp_path_factory.mktemp("project"), 1000, Path("/nowhere"))


class Run:
    """A run of a few cells on the server."""

    def __init__(
        self, folder: Path, server: VolcanoServer, code: Snapshot, recipe: str = "", site: str = ""
    ) -> None:
        self.server = server
        self.code = code
        self.site = folder / "site.yaml"
        self.site.write_text(
            f"name: kube\nscheduler: volcano\npython: python3\n"
            f"volcano:\n  namespace: ml\n  kubeconfig: {server.kubeconfig(folder)}\n"
            f"  image: registry.example.org/torch:2.9\n"
            f"  volumes: [{{path: {folder}, claim: shared}}]\n{site}"
        )
        path = folder / "recipe.yaml"
        path.write_text(
            "name: some\nkind: command\nsweep: {grid: {n: [0, 1, 2, 3]}}\n"
            f"command: {{run: [echo]}}\n{recipe}"
        )
        self.plan: Plan = compile_plan(load_recipe(path), load_site(self.site), folder / "runs")
        self.folder: RunFolder = create_run(self.plan)

    def submit(self) -> list[str]:
        self.names = submit_to_volcano(next_submission(self.plan, self.code), self.folder)
        return self.names

    def look(self) -> VolcanoWatcher:
        watcher = watch(self.folder)
        assert isinstance(watcher, VolcanoWatcher)
        watcher.ask()
        assert watcher.trouble is None
        return watcher

    def states(self) -> list[tuple[str, str | None]]:
        cells = self.look().refresh().cells
        return [(cells[index].state, cells[index].reason) for index in sorted(cells)]

    def pod(self, index: int, phase: str, job: int = 0, **status: Any) -> str:
        name = f"{self.names[job]}-task-{index}"
        self.server.pod(name, self.names[job], phase, **status)
        return name

    def event(self, cell: int, event: str, ago: float = 60, **fields: Any) -> None:
        folder = self.folder.cell_dir(self.folder.cell(cell)["id"])
        folder.mkdir(exist_ok=True)
        moment = datetime.now(timezone.utc) - timedelta(seconds=ago)
        line = {"time": moment.isoformat(timespec="milliseconds"), "event": event, **fields}
        with (folder / "events.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def start(self, cell: int, pod: str, ago: float = 60) -> None:
        fields = {"attempt": 1, "host": "elsewhere", "pid": 1, "submission": 1, "job": pod}
        self.event(cell, "started", ago, **fields)

    def end(self, cell: int, cause: str, ago: float = 30) -> None:
        self.event(cell, "ended", ago, attempt=1, code=1, cause=cause, reason="why")

    def journal(self) -> list[str]:
        return [entry["event"] for entry in read_journal(self.folder)]


@pytest.fixture
def run(tmp_path: Path, server: VolcanoServer, code: Snapshot) -> Run:
    return Run(tmp_path, server, code)


def container(**state: Any) -> list[dict[str, Any]]:
    return [{"name": "main", "state": state}]


# -- submitting -------------------------------------------------------------------------------


def test_the_server_sees_it_dry_and_strictly_first(run: Run) -> None:
    names = run.submit()
    assert list(run.server.jobs) == names
    posts = [call for call in run.server.calls if call.startswith("POST")]
    assert len(posts) == 2
    assert "dryRun=All" in posts[0]
    assert "dryRun" not in posts[1]
    assert all("fieldValidation=Strict" in call for call in posts)
    assert run.journal() == ["submitting", "submitted"]
    job = run.server.jobs[names[0]]
    assert job["spec"]["tasks"][0]["replicas"] == 4
    written = (run.folder.scripts / "001.yaml").read_text()
    assert names[0] in written
    assert (run.folder.scripts / "001.sh").exists()


def test_what_the_server_refuses_leaves_nothing(
    tmp_path: Path, server: VolcanoServer, code: Snapshot
) -> None:
    template = tmp_path / "mine.yaml.j2"
    template.write_text(
        '{% extends "volcano/job.yaml.j2" %}\n{% block pod %}\n'
        "          nodeSelectors: {}\n{% endblock %}\n"
    )
    run = Run(tmp_path, server, code, site="  template: mine.yaml.j2\n")
    with pytest.raises(UserError, match="nodeSelectors"):
        run.submit()
    for site, said in (("  queue: gone\n", "unable to find job queue: gone"),):
        other = Run(tmp_path, server, code, site=site)
        with pytest.raises(UserError, match=said):
            other.submit()
    server.objects["queues"]["default"]["status"]["state"] = "Closed"
    with pytest.raises(UserError, match="state `Open`"):
        Run(tmp_path, server, code).submit()
    assert not server.jobs
    assert run.journal() == []
    assert not list(run.folder.submissions.iterdir())


def test_large_arrays_are_several_jobs(
    tmp_path: Path, server: VolcanoServer, code: Snapshot
) -> None:
    run = Run(tmp_path, server, code, site="  max_job_size: 3\n")
    assert [job["spec"]["tasks"][0]["replicas"] for job in map(server.jobs.get, run.submit())] == [
        3,
        1,
    ]
    assert next_submission(run.plan, code).indices == ()


def test_gangs_are_a_job_each(tmp_path: Path, server: VolcanoServer, code: Snapshot) -> None:
    run = Run(tmp_path, server, code, "resources: {nodes: 2}\n")
    assert len(run.submit()) == 4
    assert all(job["spec"]["minAvailable"] == 2 for job in server.jobs.values())


def test_an_answer_that_is_lost(run: Run) -> None:
    """The job is there all the same; the command given again finds it by its name."""
    run.server.trouble = ["lost"]
    with pytest.raises(PartlySubmitted, match="looks for it first"):
        run.submit()
    assert run.journal() == ["submitting", "unclear"]
    # Whoever looks before the next command sees it, too.
    assert [state for state, _ in run.states()] == ["pending"] * 4
    (name,) = run.server.jobs
    assert settle(run.folder) == [name]
    assert run.journal() == ["submitting", "unclear", "submitted"]
    assert next_submission(run.plan, run.code).indices == ()


@pytest.mark.parametrize("status", [502, 503, 504])
def test_no_clear_answer_and_no_job(run: Run, status: int) -> None:
    run.server.trouble = [status]
    with pytest.raises(PartlySubmitted, match="looks for it first"):
        run.submit()
    assert settle(run.folder) == []
    assert run.journal() == ["submitting", "unclear", "vanished"]
    assert len(next_submission(run.plan, run.code).indices) == 4
    run.submit()
    assert len(run.server.jobs) == 1


def test_one_of_several_is_refused(tmp_path: Path, server: VolcanoServer, code: Snapshot) -> None:
    run = Run(tmp_path, server, code, site="  max_job_size: 1\n")
    submit = server._create
    server._create = lambda job, query: (  # type: ignore[method-assign]
        (403, {"message": "exceeded quota"})
        if len(server.jobs) == 2 and "dryRun" not in query
        else submit(job, query)
    )
    with pytest.raises(PartlySubmitted, match=r"exceeded quota\n2 of 4 jobs were submitted"):
        run.submit()
    assert run.journal() == ["submitting", "submitted"] * 2 + ["submitting", "refused"]
    assert next_submission(run.plan, code).indices == (2, 3)


def test_a_job_of_a_run_folder_that_was_removed(run: Run, tmp_path: Path) -> None:
    (name,) = run.submit()
    shutil.rmtree(run.folder.path)
    again = Run(tmp_path, run.server, run.code)
    with pytest.raises(UserError, match="of an earlier run in this folder"):
        again.submit()
    run.server.phase(name, "Completed")
    run.server.jobs[name]["metadata"]["annotations"]["hpcml-folder"] = "/another"
    with pytest.raises(UserError, match="of an earlier run in this folder"):
        again.submit()
    run.server.jobs[name]["metadata"]["annotations"]["hpcml-folder"] = str(again.folder.path)
    assert again.submit() == [name]
    assert "status" not in run.server.jobs[name]


def test_nobody_answers(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run.submit()
    run.server.stop()
    watcher = watch(run.folder)
    watcher.ask()
    assert "gave no answer" in str(watcher.trouble)
    assert watcher.refresh().counts() == {"pending": 4}
    assert watcher.going(watcher.refresh())
    with pytest.raises(UserError, match="some of it may be queued already"):
        next_submission(run.plan, run.code)
    with pytest.raises(UserError, match="some of it may be queued already"):
        settle(run.folder)


def test_where_the_server_is(
    tmp_path: Path, server: VolcanoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = server.kubeconfig(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(VolcanoError, match=r"set \$KUBECONFIG"):
        Cluster({"namespace": "ml"})
    with pytest.raises(VolcanoError, match="gone"):
        Cluster({"namespace": "ml", "kubeconfig": str(path), "context": "gone"})
    assert Cluster({"namespace": "ml", "kubeconfig": "~/kubeconfig"}).jobs("a=b") == []
    monkeypatch.setenv("KUBECONFIG", str(path))
    assert Cluster({"namespace": "ml", "context": "here"}).jobs("a=b") == []
    with pytest.raises(VolcanoError, match="could not find"):
        Cluster({"namespace": "other"}).create({"metadata": {}})


def test_without_the_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "kubernetes", None)
    with pytest.raises(VolcanoError, match=r"pip install 'hpcml\[volcano\]'"):
        Cluster({"namespace": "ml"})


def test_long_lists_come_in_pages(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcml.launch.volcano.client._PAGE", 2)
    (name,) = run.submit()
    for index in range(5):
        run.pod(index, "Running")
    cluster = Cluster(run.plan.site.volcano.model_dump())
    label = next(iter(read_journal(run.folder)))["label"]
    assert len(cluster.pods(label)) == 5
    assert [job["metadata"]["name"] for job in cluster.jobs(label)] == [name]


# -- states -----------------------------------------------------------------------------------


def test_states_of_pods(run: Run) -> None:
    (name,) = run.submit()
    assert run.states() == [("pending", "waits to be looked at by the scheduler")] * 4
    run.server.phase(name, "Running", running=1)
    pods = [run.pod(0, "Running"), run.pod(1, "Running")]
    message = "0/3 nodes are unavailable: 3 Insufficient nvidia.com/gpu."
    condition = {"type": "PodScheduled", "status": "False", "message": message}
    run.pod(2, "Pending", conditions=[condition])
    run.start(0, pods[0])
    assert run.states() == [
        ("running", None),
        ("pending", "starts"),
        ("pending", f"waits for room: {message}"),
        ("pending", "waits to be looked at by the scheduler"),
    ]
    run.end(0, "done")
    run.pod(0, "Succeeded", containerStatuses=container(terminated={"exitCode": 0}))
    assert run.states()[0] == ("done", None)


@pytest.mark.parametrize(
    ("waiting", "said"),
    [
        (
            {"reason": "ImagePullBackOff", "message": "Back-off pulling image x"},
            "waits: its image cannot be fetched: Back-off pulling image x",
        ),
        ({"reason": "InvalidImageName"}, "waits: its image cannot be fetched: InvalidImageName"),
        (
            {"reason": "CreateContainerConfigError", "message": 'secret "x" not found'},
            'waits: its container cannot be made: secret "x" not found',
        ),
        (
            {"reason": "ContainerCreating"},
            "starts: its node fetches the image and what it sees",
        ),
    ],
)
def test_why_a_pod_that_has_a_node_waits(run: Run, waiting: dict[str, str], said: str) -> None:
    run.submit()
    run.pod(0, "Pending", containerStatuses=container(waiting=waiting))
    run.server.objects["pods"][f"{run.names[0]}-task-0"]["spec"]["nodeName"] = "n1"
    assert run.states()[0] == ("pending", said)


def test_why_a_gang_waits(tmp_path: Path, server: VolcanoServer, code: Snapshot) -> None:
    run = Run(tmp_path, server, code, "resources: {nodes: 2}\n")
    names = run.submit()
    message = "2/0 tasks in gang unschedulable: pod group is not ready, 2 Pending, 2 minAvailable."
    for name in names:
        uid = server.jobs[name]["metadata"]["uid"]
        conditions = [{"type": "Unschedulable", "status": "True", "message": message}]
        server.objects["podgroups"][f"{name}-{uid}"] = {
            "status": {"phase": "Pending", "conditions": conditions}
        }
        server.phase(name, "Pending")
    assert run.states() == [("pending", f"waits for room for its 2 pods at once: {message}")] * 4


def test_why_nothing_of_a_job_is_there_yet(run: Run) -> None:
    (name,) = run.submit()
    run.server.phase(name, "Pending")
    group: dict[str, Any] = {"status": {"phase": "Pending"}}
    run.server.objects["podgroups"][name] = group
    assert run.states()[0][1] == (
        "waits for the queue default to admit it: what the queue may use is in use"
    )
    run.server.objects["queues"]["default"]["status"]["state"] = "Closed"
    assert run.states()[0][1] == "waits: the queue default is closed"
    run.server.forbidden = {"podgroups", "queues"}
    assert run.states()[0][1] == "waits to be looked at by the scheduler"


def test_a_pod_that_comes_back(run: Run) -> None:
    """It saved and ended with 75; Volcano makes it anew, with the same name."""
    (name,) = run.submit()
    run.server.phase(name, "Running", running=3)
    pod = run.pod(0, "Failed", containerStatuses=container(terminated={"exitCode": 75}))
    run.start(0, pod)
    run.end(0, "stopped")
    assert run.states()[0] == ("pending", "why; is about to start again")
    run.server.phase(name, "Restarting")
    del run.server.objects["pods"][pod]
    assert run.states()[0] == ("pending", "why; waits to be looked at by the scheduler")
    assert 0 in run.look().taken(run.look().refresh())
    assert next_submission(run.plan, run.code).indices == ()


def test_an_attempt_whose_pod_was_replaced_is_not_alive(run: Run) -> None:
    (name,) = run.submit()
    run.server.phase(name, "Running", running=1)
    now = datetime.now(timezone.utc)
    pod = run.pod(0, "Running", startTime=(now - timedelta(seconds=20)).isoformat()[:19] + "Z")
    run.start(0, pod, ago=60)
    assert run.states()[0] == ("pending", "starts")
    run.start(0, pod, ago=10)
    assert run.states()[0][0] == "running"


@pytest.mark.parametrize(
    ("status", "state", "said"),
    [
        (
            {"containerStatuses": container(terminated={"reason": "OOMKilled", "exitCode": 137})},
            "failed",
            "its pod ran out of memory",
        ),
        ({"reason": "Evicted", "message": "low on disk"}, "lost", "was evicted: low on disk"),
        ({"reason": "DeadlineExceeded"}, "lost", "did not leave in time"),
        (
            {"containerStatuses": container(terminated={"exitCode": 127, "message": "no bash"})},
            "lost",
            "its pod ended with exit code 127: no bash",
        ),
    ],
)
def test_how_pods_end_that_leave_no_word(
    run: Run, status: dict[str, Any], state: str, said: str
) -> None:
    (name,) = run.submit()
    run.server.phase(name, "Running", running=3)
    pod = run.pod(0, "Failed", **status)
    run.folder.tasks.joinpath(f"001.{pod}.err").write_text("one\nthe last line\n")
    found = run.states()[0]
    assert found[0] == state
    assert said in str(found[1])
    assert str(found[1]).endswith(": the last line")
    assert next_submission(run.plan, run.code).indices == (0,)


def test_a_job_that_is_gone(run: Run) -> None:
    (name,) = run.submit()
    run.server.phase(name, "Aborted")
    assert run.states() == [("lost", "its job was aborted")] * 4
    run.server.jobs.clear()
    assert run.states() == [("lost", "its job is no longer on the server")] * 4
    assert len(next_submission(run.plan, run.code).indices) == 4


def test_lanes_run_their_tasks_one_after_another(
    tmp_path: Path, server: VolcanoServer, code: Snapshot
) -> None:
    run = Run(tmp_path, server, code, "array: {max_running: 2, pack: 1}\n")
    (name,) = run.submit()
    assert server.jobs[name]["spec"]["tasks"][0]["replicas"] == 2
    server.phase(name, "Running", running=1)
    pod = run.pod(0, "Running")
    run.pod(1, "Succeeded", containerStatuses=container(terminated={"exitCode": 0}))
    run.start(0, pod)
    run.end(0, "done")
    for cell in (1, 3):
        run.start(cell, f"{name}-task-1")
        run.end(cell, "done")
    assert [state for state, _ in run.states()] == ["done", "done", "pending", "done"]
    assert run.look().taken(run.look().refresh()) == {2}


def test_it_is_followed_until_nothing_is_left(run: Run) -> None:
    (name,) = run.submit()
    watcher = run.look()

    def show(status: Any) -> None:
        run.server.phase(name, "Completed")
        for cell in range(4):
            run.start(cell, f"{name}-task-{cell}")
            run.end(cell, "done")
        watcher._asked = float("-inf")

    assert follow(watcher, show, lambda text: None).counts() == {"done": 4}


def test_cancelling(tmp_path: Path, server: VolcanoServer, code: Snapshot) -> None:
    """A job goes when nobody wants anything of it; another stays for its other cells."""
    run = Run(tmp_path, server, code, site="  max_job_size: 2\n")
    first, second = run.submit()
    watcher = run.look()
    status = watcher.refresh()
    for cell in (0, 1, 2):
        cancel_cell(run.folder, run.folder.cell(cell)["id"])
    assert watcher.remove(status, {0, 1, 2}) is None
    assert list(server.jobs) == [second]
    assert first not in server.jobs
    assert [state for state, _ in run.states()] == ["stopped"] * 3 + ["pending"]
    assert next_submission(run.plan, code).indices == (0, 1, 2)


# -- stages -----------------------------------------------------------------------------------


def test_a_stage_begins_when_the_one_before_is_done(
    tmp_path: Path, server: VolcanoServer, code: Snapshot
) -> None:
    run = Run(tmp_path, server, code)
    path = tmp_path / "staged.yaml"
    path.write_text(
        "name: two\nstages:\n"
        "  one: {kind: command, command: {run: [echo]}}\n"
        "  two: {needs: [one], kind: command, command: {run: [echo]}}\n"
    )
    one, two = compile_stages(load_stages(path), load_site(run.site), tmp_path / "runs")
    assert left_before(one) == []
    assert left_before(two) == ["two.one"]
    folder = create_run(one)
    assert left_before(two) == ["two.one"]
    cell = folder.cell_dir(folder.cell(0)["id"])
    cell.mkdir()
    (cell / "result.json").write_text("{}")
    assert left_before(two) == []
