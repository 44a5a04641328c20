"""What people are told of cells that wait, run and fail on Slurm."""

from __future__ import annotations

import json
import os
import signal
import sys

import pytest

from hpcml.launch.slurm.query import queue
from tests.conftest import wait_until
from tests.integration.slurm.conftest import LoginNode


def test_why_cells_wait(login: LoginNode) -> None:
    """Held by its owner; then, released, for the other cells of the array."""
    recipe = login.recipe(
        "waits",
        ["sleep", "100"],  # until it is cancelled
        [1, 2, 3],
        array={"max_running": 1},
        slurm={"sbatch": {"hold": True}},
    )
    login("sweep", recipe)
    assert ["is held" in reason for reason in login.reasons()] == [True] * 3
    # A person has held it, who alone knows why.
    assert "released" not in login("sweep", recipe).stderr
    assert login.states() == ["pending"] * 3
    follower = login.start("logs", "waits", "0", "-f")
    assert follower.stderr
    assert "is held" in follower.stderr.readline()
    login.cluster.run("scontrol", "release", *login.jobs())
    wait_until(lambda: "running" in login.states(), 60)
    wait_until(
        lambda: (
            login.reasons()[1:]
            == ["waits for other cells, since array.max_running are running"] * 2
        )
    )
    assert "cells 1, 2 pending: waits for other cells" in login("status").stdout
    login("cancel", "waits")
    _, err = follower.communicate(timeout=60)
    assert err.count("is held") == 0
    assert "running" in err
    assert follower.returncode == 0


@pytest.mark.slurm_alone
def test_a_node_that_cannot_start_jobs(login: LoginNode) -> None:
    """Slurm holds what it could not start: the command given again releases it, in one call."""
    broken, calls = login.folder / "broken", login.folder / "calls"
    broken.touch()
    prolog = login.write("prolog", f"#!/bin/sh\n! test -e {broken}\n")
    prolog.chmod(0o755)
    login.wrap("scontrol", f'echo "$@" >> {calls}\n"$REAL" "$@"\n')
    recipe = login.recipe("unlucky", ["true"], [1, 2, 3])

    def holding(text: str) -> str:
        return text.replace(",nohold_on_prolog_fail", "") + f"Prolog={prolog}\n"

    with login.cluster.configured(holding):
        login("sweep", recipe)
        (job,) = login.jobs()
        wait_until(lambda: all("is held" in reason for reason in login.reasons()))
        said = login("status").stdout
        assert "is held: its node could not start it; the sweep command given again" in said
        broken.unlink()
        login.cluster.resume_nodes()
        calls.unlink(missing_ok=True)
        assert f"released {job}_[0-2]" in login("sweep", recipe).stderr
        assert calls.read_text().splitlines() == [f"release {job}_[0-2]"]
        wait_until(lambda: login.states() == ["done"] * 3)


def test_a_cell_is_followed_from_the_queue_to_its_end(login: LoginNode) -> None:
    go = login.folder / "go"
    recipe = login.recipe(
        "prints",
        ["sh", "-c", f"echo 0; until [ -e {go} ]; do sleep 0.1; done; echo 1; echo 2"],
        [1],
        slurm={"sbatch": {"hold": True}},
    )
    login("sweep", recipe)
    follower = login.start("logs", "prints", "0", "-f")
    watcher = login.start("watch", "prints")
    assert follower.stderr
    assert "is held" in follower.stderr.readline()
    login.cluster.run("scontrol", "release", *login.jobs())
    assert watcher.stdout
    while "cell 0 (n=1): running" not in (line := watcher.stdout.readline()):
        assert line, "it ended without having seen the cell run"
    go.touch()
    out, err = follower.communicate(timeout=60)
    assert out.split() == ["0", "1", "2"]
    assert "is held" not in err
    out, err = watcher.communicate(timeout=60)
    assert "cell 0 (n=1): done" in out


CAUSES = """
import os, pathlib, signal, sys, time
case = sys.argv[1]
mark = pathlib.Path(os.environ["HPCML_CELL_DIR"], "mark")
first = not mark.exists()
mark.touch()
if case == "always": sys.exit("it never works")
if case == "once" and first: sys.exit("not yet")
if case == "killed": os.kill(os.getpid(), signal.SIGKILL)
if case == "gpu": sys.exit(71)
if case == "memory" or case == "memory once" and first:
    x = bytearray(600 << 20)
    time.sleep(300)
"""


def test_causes(login: LoginNode) -> None:
    """Each in the right state with its cause named, side by side in one run."""
    login.write("causes.py", CAUSES)
    cases = ["always", "once", "memory", "killed", "gpu", "fine"]
    recipe = login.recipe(
        "causes",
        [sys.executable, "causes.py", "{{ params.n }}"],
        cases,
        resources={"memory": "200M"},
        retry={"application": 1, "oom": 1},
    )
    login("sweep", recipe, "--wait", code=1)
    assert dict(zip(cases, login.states(), strict=True)) == {
        "always": "failed",
        "once": "done",
        "memory": "failed",
        "killed": "failed",
        "gpu": "failed",
        "fine": "done",
    }
    reasons = dict(zip(cases, login.reasons(), strict=True))
    assert reasons["always"] == "exit code 1: it never works"
    # Slurm killed the job with its worker: it has said why.
    assert reasons["memory"].startswith("out of memory: StepId=")
    assert "exceeded memory limit" in reasons["memory"]
    assert "SIGKILL" in reasons["killed"]
    assert reasons["gpu"] == "out of memory: exit code 71"
    assert [cell["attempts"] for cell in login.status()["cells"]] == [2, 2, 1, 1, 2, 1]
    assert "out of memory: StepId=" in login("status").stdout
    # The job's own end says it, too.
    (job,) = login.jobs()
    states = ["FAILED", "COMPLETED", "FAILED", "FAILED", "FAILED", "COMPLETED"]
    login.cluster.wait_accounted(job, states)


def test_too_little_memory_once(login: LoginNode) -> None:
    """The next job of a chain knows what killed the one before, and has a budget for it."""
    login.site(coming_back="chain", links=3)
    login.write("causes.py", CAUSES)
    recipe = login.recipe(
        "memory",
        [sys.executable, "causes.py", "{{ params.n }}"],
        ["memory", "memory once"],
        resources={"memory": "200M"},
        retry={"oom": 1},
    )
    login("sweep", recipe, "--wait", code=1)
    assert login.states() == ["failed", "done"]
    assert login.reasons()[0].startswith("out of memory: StepId=")
    ends = [[end["cause"] for end in ended] for ended in login.events("ended").values()]
    assert sorted(ends) == [["oom", "done"], ["oom", "oom"]]


def test_a_job_that_somebody_removed_from_the_queue(login: LoginNode) -> None:
    recipe = login.recipe("removed", ["true"], [1, 2], slurm={"sbatch": {"hold": True}})
    login("sweep", recipe)
    login.cluster.run("scancel", *login.jobs())
    wait_until(lambda: login.reasons() == ["its job was cancelled in Slurm"] * 2, 30)
    login("sweep", recipe, "--set", "slurm.sbatch={}", "--wait")
    assert login.states() == ["done"] * 2


def test_without_accounting(login: LoginNode) -> None:
    """sacct is not asked; what ended is known by its files and by the queue."""
    login.site(accounting=False)
    login.wrap("sacct", "echo 'sacct was called' >&2\nexit 1\n")
    recipe = login.recipe("plain", ["true"], [1, 2], slurm={"sbatch": {"hold": True}})
    login("sweep", recipe)
    login.cluster.run("scancel", f"{login.jobs()[0]}_1")
    assert login.reasons() == [
        f"is held; `scontrol release {login.jobs()[0]}` lets it go",
        "its job has left the queue",
    ]
    login.cluster.run("scontrol", "release", *login.jobs())
    wait_until(lambda: login.states() == ["done", "lost"], 60)


def test_jobs_of_others_are_none_of_ours(login: LoginNode) -> None:
    """Other jobs of the same user, with names and scripts that look strange."""
    other = login.cluster.submit(
        "--hold", "--job-name=a b\x1f1_[0-", script="true", folder=login.folder
    )
    recipe = login.recipe("ours", ["true"], [1])
    login("sweep", recipe, "--wait")
    assert login.states() == ["done"]
    login.cluster.run("scancel", other)


@pytest.mark.parametrize(
    ("array", "indices"),
    [
        ("4%1", {4}),
        ("1-9:2%3", {1, 3, 5, 7, 9}),
        ("60-89,91-94", {*range(60, 90), *range(91, 95)}),
        # More than squeue shows unless it is told to.
        (",".join(map(str, range(0, 1000, 3))), set(range(0, 1000, 3))),
    ],
)
def test_every_waiting_task_of_an_array_is_seen(
    login: LoginNode, array: str, indices: set[int]
) -> None:
    job = login.cluster.submit("--hold", f"--array={array}", script="true", folder=login.folder)
    found = queue("root")
    assert {index for number, index in found.tasks if number == int(job)} == indices
    login.cluster.run("scancel", job)


def test_an_interrupted_watch_leaves_the_run_alone(login: LoginNode) -> None:
    go = login.folder / "go"
    recipe = login.recipe("watched", ["sh", "-c", f"until [ -e {go} ]; do sleep 0.1; done"], [1])
    login("sweep", recipe)
    watcher = login.start("watch", "watched")
    wait_until(lambda: login.states() == ["running"], 60)
    os.kill(watcher.pid, signal.SIGINT)
    assert watcher.wait(timeout=30) == 130
    go.touch()
    wait_until(lambda: login.states() == ["done"], 60)


@pytest.mark.parametrize("option", ["--json", "--all"])
def test_status_asks_slurm_once(login: LoginNode, option: str) -> None:
    log = login.folder / "calls"
    for command in ("squeue", "sacct", "scontrol"):
        login.wrap(command, f'echo {command} >> {log}\n"$REAL" "$@"\n')
    recipe = login.recipe("asks", ["true"], list(range(20)), slurm={"sbatch": {"hold": True}})
    login("sweep", recipe)
    log.unlink(missing_ok=True)
    login("status", option)
    assert log.read_text().split() == ["squeue"]
    login.cluster.run("scancel", *login.jobs())
    log.unlink()
    text = login("status", option).stdout
    assert log.read_text().split() == ["squeue", "sacct"]
    if option == "--json":
        assert {cell["state"] for cell in json.loads(text)["cells"]} == {"lost"}


def test_each_task_of_an_array_has_its_own_reason(login: LoginNode) -> None:
    """Also those that squeue shows in one line: some are held, the others wait for something."""
    job = login.cluster.submit(
        "--begin=now+1hour", "--array=0-999:3", script="true", folder=login.folder
    )
    login.cluster.run("scontrol", "hold", f"{job}_6")
    reasons = {
        index: state.reason
        for (number, index), state in queue("root").tasks.items()
        if number == int(job)
    }
    assert set(reasons) == set(range(0, 1000, 3))
    assert [index for index, reason in reasons.items() if "JobHeld" in reason] == [6]
    login.cluster.run("scancel", job)
