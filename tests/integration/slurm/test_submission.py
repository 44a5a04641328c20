"""Giving cells to Slurm: in arrays, once, whatever stands around sbatch."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import sys
from itertools import accumulate
from pathlib import Path

import pytest

from hpcml.launch.slurm.client import environment
from tests.conftest import wait_until
from tests.integration.slurm.conftest import LoginNode


def most_at_a_time(login: LoginNode) -> int:
    """How many tasks ran side by side at most, by what their cells say."""
    started, ended = login.events("started"), login.events("ended")
    spans: dict[str, list[str]] = {}
    for cell, (event,) in started.items():
        spans.setdefault(event["job"], []).extend((event["time"], ended[cell][0]["time"]))
    changes = [(min(times), 1) for times in spans.values()]
    changes += [(max(times), -1) for times in spans.values()]
    return max(accumulate(change for _, change in sorted(changes)))


def test_more_cells_than_an_array_may_have(login: LoginNode) -> None:
    """The limit of the cluster is on the index (1,001): the indices of each array begin anew."""
    recipe = login.recipe("many", ["true"], list(range(2500)), array={"pack": 2, "max_running": 50})
    login("sweep", recipe, "--wait", timeout=500)
    assert [entry["tasks"] for entry in login.journal()] == [1001, 249]
    started = login.events("started")
    assert len(started) == 2500
    assert {len(events) for events in started.values()} == {1}
    assert len({events[0]["job"] for events in started.values()}) == 1250
    assert most_at_a_time(login) <= 50


def test_a_banner_of_the_site_does_not_hide_the_job(login: LoginNode) -> None:
    """A site's wrapper of sbatch prints lines of its own around the number."""
    login.wrap(
        "sbatch",
        "echo 'sbatch: 12 jobs of yours wait, 3 run' >&2\n"
        "echo '*** Maintenance on 2026-12-01, 8:00 ***'\n"
        '"$REAL" "$@"\n'
        "echo 'Have a nice day.'\n",
    )
    recipe = login.recipe("banner", ["true"], [1])
    login("sweep", recipe, "--wait")
    (entry,) = login.journal()
    assert login.states() == ["done"]
    assert login.cell_dirs()[0].joinpath("events.jsonl").read_text().count(f"{entry['job']}_0")


def test_a_cluster_that_is_named(login: LoginNode) -> None:
    """sbatch answers with the number and the cluster; all other questions go there, too."""
    options = {"sbatch": {"clusters": "hpcml", "hold": True}}
    recipe = login.recipe("federated", ["true"], [1, 2], slurm=options)
    login("sweep", recipe)
    (entry,) = login.journal()
    assert entry["cluster"] == "hpcml"
    assert "is held" in login.reasons()[1]
    login("cancel", "federated", "1")
    wait_until(lambda: login.queue() == ["PENDING"], 30)
    login.cluster.run("scancel", *login.jobs())
    wait_until(lambda: login.reasons() == ["its job was cancelled in Slurm", "cancelled"], 30)


def test_no_number_fails_loudly_and_submits_nothing_twice(login: LoginNode) -> None:
    """The wrapper swallows the number: something may have been submitted."""
    login.wrap("sbatch", '"$REAL" "$@" > /dev/null\necho "Thank you for your job"\n')
    recipe = login.recipe("mute", ["true"], [1, 2])
    said = login("sweep", recipe, code=1).stderr
    assert "Thank you for your job" in said
    assert not login.journal("submitted")
    login.unwrap()
    said = login("sweep", recipe, "--wait").stderr
    assert "had been submitted" in said
    assert len(login.jobs()) == 1
    assert {len(events) for events in login.events("started").values()} == {1}


def is_locked(path: Path) -> bool:
    with path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


@pytest.mark.parametrize("seconds", ["0", "60"])
def test_a_command_killed_between_submitting_and_writing_it_down(
    login: LoginNode, seconds: str
) -> None:
    """Whether its job still runs or has ended, the next command finds it and submits no other."""
    go = login.folder / "go"
    lines = f'until [ -e "{go}" ]; do sleep 0.1; done\n'
    login.wrap("sbatch", '"$REAL" "$@" > "$0.out"\nkill -9 $PPID\n' + lines)
    recipe = login.recipe("killed", ["sleep", seconds], [1, 2])
    login("sweep", recipe, code=-signal.SIGKILL)
    job = (login.folder / "bin" / "sbatch.out").read_text().strip()
    assert not login.journal("submitted")
    # The lock is kept by sbatch: while it is at it, no other command decides anything.
    assert "another command" in login("sweep", recipe, code=2).stderr
    go.touch()
    wait_until(lambda: not is_locked(login.run_folder() / "driver"), 60)
    login.unwrap()
    if seconds == "0":
        wait_until(lambda: login.states() == ["done", "done"], 60)
    else:
        wait_until(lambda: "running" in login.states(), 60)
    said = login("sweep", recipe).stderr
    assert f"job {job} had been submitted" in said
    assert login.jobs() == [job]
    login("cancel", "killed")
    assert {len(events) for events in login.events("started").values()} == {1}


def test_a_command_killed_before_sbatch_submits_everything_when_given_again(
    login: LoginNode,
) -> None:
    login.wrap("sbatch", "kill -9 $PPID\n")
    recipe = login.recipe("early", ["true"], [1, 2])
    login("sweep", recipe, code=-signal.SIGKILL)
    login.unwrap()
    login("sweep", recipe, "--wait")
    assert len(login.journal("vanished")) == 1
    assert len(login.jobs()) == 1


@pytest.mark.slurm_alone
def test_a_limit_is_reached_half_way(login: LoginNode) -> None:
    """Slurm takes the first of three arrays: what is submitted stays, the rest follows later."""
    login.site(max_array_size=11)
    recipe = login.recipe("limit", ["true"], list(range(30)))
    modify = ("sacctmgr", "-i", "-Q", "modify", "user", "root", "set")
    login.cluster.run(*modify, "MaxSubmitJobs=15")
    try:
        said = login("sweep", recipe, code=1).stderr
    finally:
        login.cluster.run(*modify, "MaxSubmitJobs=-1")
    assert "11 of 30 tasks" in said
    assert "limit" in said.lower()
    assert len(login.journal("refused")) == 1
    login("sweep", recipe, "--wait")
    assert [entry["tasks"] for entry in login.journal()] == [11, 11, 8]
    assert {len(events) for events in login.events("started").values()} == {1}
    assert login.states() == ["done"] * 30


def test_what_slurm_refuses_is_said(login: LoginNode) -> None:
    recipe = login.recipe("refused", ["true"], [1], slurm={"partition": "nowhere"})
    said = login("sweep", recipe, code=1).stderr
    assert "invalid partition" in said
    assert login.states() == ["pending"]


def test_more_gpus_than_any_node_has(login: LoginNode) -> None:
    """The site's file says nothing of the nodes; Slurm does."""
    recipe = login.recipe("greedy", ["true"], [1], resources={"gpus": 9})
    assert "not available" in login("sweep", recipe, code=1).stderr


def test_whole_nodes_of_the_site_and_memory_of_the_recipe(login: LoginNode) -> None:
    """Slurm would give the whole node, and of its memory only what the recipe needs."""
    login.site(options={"exclusive": True})
    hold = {"sbatch": {"hold": True}}
    recipe = login.recipe("whole", ["true"], [1], resources={"memory": "1G"}, slurm=hold)
    said = login("sweep", recipe).stderr
    assert "note: exclusive of site cluster wins over resources.memory" in said
    job = login.cluster.job(login.jobs()[0])
    assert (job["OverSubscribe"], job["MinMemoryNode"]) == ("NO", "0")
    login.cluster.run("scancel", *login.jobs())


# Where the cluster is, and who asks.
KEPT = {"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"}


def test_no_variable_that_slurm_knows_leaks(
    login: LoginNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All that its commands look for in their environment, taken from the programs themselves."""
    programs = [shutil.which(name) for name in ("sbatch", "srun", "squeue", "scancel", "sacct")]
    libraries = Path("/usr/lib").rglob("libslurmfull*.so")
    text = b"".join(Path(str(path)).read_bytes() for path in [*programs, *libraries])
    pattern = rb"\b(_?S(?:LURM|BATCH|RUN|ALLOC|QUEUE|ACCT|CANCEL|CONTROL|INFO)D?_[A-Z0-9_]+)\0"
    names = {name.decode() for name in re.findall(pattern, text)}
    assert {"SBATCH_PARTITION", "SLURM_ARRAY_TASK_ID", "SQUEUE_FORMAT", "SLURMD_NODENAME"} <= names
    for name in names:
        monkeypatch.setenv(name, "leaked")
    kept = {name for name, value in environment().items() if value == "leaked"}
    assert kept <= KEPT
    # What sbatch makes of the rest is a job as if nothing had been set.
    login.environment.update(dict.fromkeys(names - KEPT, "7"))
    login.environment.update(SBATCH_PARTITION="debug", SBATCH_TIMELIMIT="5", SQUEUE_STATES="CD")
    recipe = login.recipe(
        "outer",
        ["sh", "-c", "echo $SLURM_JOB_PARTITION $SLURM_CPUS_PER_TASK; env | grep -c ^SBATCH"],
        [1],
    )
    login("sweep", recipe, "--wait", code=1)
    (cell,) = login.cell_dirs()
    assert (cell / "log.1.out").read_text() == "gpu 1\n0\n"


def test_a_cell_that_submits_cells(login: LoginNode) -> None:
    """A job gives the command itself. What it submits is a run beside its own, and none of it."""
    login.write(
        "tell.py",
        "import json, os, pathlib, time\n"
        "pathlib.Path(os.environ['HPCML_CELL_DIR'], 'told').write_text("
        "json.dumps(dict(os.environ)))\n"
        # The cell that submitted this one ends meanwhile, on the same node.
        f"while not os.path.exists({str(login.folder / 'go')!r}): time.sleep(0.1)\n",
    )
    # So that the cell has no other hpcml than its run's.
    del login.environment["PYTHONPATH"]
    node = {"nodelist": "n1"}
    login.recipe("inner", [sys.executable, "tell.py"], [1, 2], slurm=node)
    outer = login.recipe(
        "outer",
        [sys.executable, "-m", "hpcml", "sweep", "inner.yaml"],
        [1],
        resources={"gpus": 2, "processes": 1, "cpus": 3},
        slurm=node,
        env={"MINE": "yes"},
    )
    login("sweep", outer, "--wait")
    # What is edited after the outer one was submitted is not what runs.
    (login.folder / "tell.py").write_text("raise SystemExit('edited')")
    wait_until(lambda: len(list(login.folder.glob("runs/inner/*/cells/*/told"))) == 2, 60)
    (login.folder / "go").touch()
    wait_until(lambda: login.status("inner")["states"] == {"done": 2}, 60)
    (job,) = [
        json.loads(line)["job"]
        for file in login.folder.glob("runs/outer/*/submissions.jsonl")
        for line in file.read_text().splitlines()
        if '"submitted"' in line
    ]
    for path in login.folder.glob("runs/inner/*/cells/*/told"):
        told = json.loads(path.read_text())
        assert told["MINE"] == "yes"
        assert told["SLURM_ARRAY_JOB_ID"] != str(job)
        assert told["SLURM_CPUS_PER_TASK"] == told["OMP_NUM_THREADS"] == "1"
        assert "CUDA_VISIBLE_DEVICES" not in told
        # But from where it was submitted.
        about = {name for name, value in told.items() if "/outer/" in value}
        assert about == {"SLURM_SUBMIT_DIR"}


def test_a_run_folder_with_any_name(login: LoginNode) -> None:
    """Spaces, quotes, percent signs (which Slurm replaces in the names of logs), and no shell."""
    root = login.folder / "a b%A%%j 'c' \"d\" $(touch pwned) ü"
    recipe = login.recipe("anywhere", ["pwd"], [1])
    login("sweep", recipe, "--wait", "--root", root)
    (run,) = root.glob("anywhere/*")
    (log,) = run.glob("cells/*/log.1.out")
    assert str(run) in log.read_text()
    assert len(list(run.glob("tasks/001.*_0.out"))) == 1
    assert not list(login.folder.rglob("pwned"))
    # The job is found by its script all the same.
    status = json.loads(login("status", "--json", "--root", root).stdout)
    assert status["states"] == {"done": 1}


def test_the_preview_is_what_happens(login: LoginNode) -> None:
    """The script byte for byte, and the calls of sbatch."""
    login.site(max_array_size=2)
    log = login.folder / "calls"
    login.wrap("sbatch", f'printf "%q " sbatch "$@" >> {log}\necho >> {log}\n"$REAL" "$@"\n')
    recipe = login.recipe("preview", ["true"], [1, 2, 3], array={"max_running": 1})
    preview = login("sweep", recipe, "--dry-run")
    assert not (login.folder / "runs").exists()
    login("sweep", recipe, "--wait")
    assert (login.run_folder() / "scripts" / "001.sh").read_text() == preview.stdout
    foretold = [line for line in preview.stderr.splitlines() if line.startswith("sbatch")]
    first, second = foretold
    called = first, second.replace("<job 1>", login.jobs()[0])
    assert [shlex.split(line) for line in log.read_text().splitlines()] == [
        shlex.split(line) for line in called
    ]


def test_following_may_end_before_the_jobs(login: LoginNode) -> None:
    """Ctrl-C ends the command that waits, and nothing else."""
    go = login.folder / "go"
    recipe = login.recipe("patience", ["sh", "-c", f"until [ -e {go} ]; do sleep 0.1; done"], [1])
    sweep = login.start("sweep", recipe, "--wait")
    wait_until(lambda: list(login.folder.glob("runs/*/*/cells/*/events.jsonl")), 60)
    os.kill(sweep.pid, signal.SIGINT)
    _, err = sweep.communicate(timeout=30)
    assert sweep.returncode == 130
    assert "the cells go on" in err
    # The same command again submits nothing, and follows.
    go.touch()
    login("sweep", recipe, "--wait")
    assert len(login.jobs()) == 1
    assert {len(events) for events in login.events("started").values()} == {1}


def test_runs_are_found_where_the_site_keeps_them(login: LoginNode, tmp_path: Path) -> None:
    site = login.folder / "site_configs" / "cluster.yaml"
    site.write_text(site.read_text() + f"runs: {tmp_path}/scratch\n")
    recipe = login.recipe("elsewhere", [sys.executable, "-c", "print('here')"], [1])
    login("sweep", recipe, "--wait")
    assert "here" in login("logs", "elsewhere", "0").stdout
    assert "1 done" in login("status").stdout
    assert "no runs in" in login("status", "--root", tmp_path / "runs", code=2).stderr
