"""Cells that are interrupted in every way that a cluster has, and end as if nothing had been."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from hpcml.launch.slurm.query import accounting
from tests.conftest import Hpcml, of_folder, wait_until
from tests.integration.slurm.conftest import LoginNode
from tests.integration.test_command_sweep import TRAIN

RATES = [0.01, 0.03, 0.1]


# A step at which cells wait for a file `go`, so that what befalls them befalls them there.
HELD = 30


def descent(login: Hpcml, pause: float, held: bool = False, **keys: object) -> Path:
    """Sixty steps that save every ten and when asked to, for each learning rate."""
    pausing = "    time.sleep(pause)\n"
    holding = f"not stop and not os.path.exists({str(login.folder / 'go')!r})"
    hold = f"    while state['step'] == {HELD} and {holding}: time.sleep(0.1)\n"
    assert pausing in TRAIN
    program = TRAIN.replace(pausing, pausing + hold) if held else TRAIN
    login.write("train.py", program)
    document = {
        "name": "descent",
        "kind": "command",
        "params": {"pause": pause},
        "sweep": {"grid": {"n": RATES}},
        "objective": {"metric": "loss"},
        "resources": {"time": "5m"},
        "command": {"run": [sys.executable, "train.py", "{{ params.n }}", "{{ params.pause }}"]},
        **keys,
    }
    return login.write("descent.yaml", json.dumps(document))


def losses(folder: Path) -> dict[float, dict[int, float]]:
    """The loss of each step by learning rate; the last line of a step counts."""
    found = {}
    for cell in folder.glob("runs/descent/*/cells/*"):
        lines = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
        rate = json.loads((cell / "cell.json").read_text())["params"]["n"]
        found[rate] = {line["step"]: line["loss"] for line in lines}
    return found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[float, dict[int, float]]:
    """What comes out where nothing happens."""
    here = Hpcml(tmp_path_factory.mktemp("undisturbed"))
    here("sweep", descent(here, 0.0), "--site", "local")
    return losses(here.folder)


def reached(login: LoginNode, step: int, cells: int = 3) -> bool:
    """Whether so many cells have got to a step."""
    files = list(login.folder.glob("runs/*/*/cells/*/metrics.jsonl"))
    return sum(f'"step":{step},' in path.read_text() for path in files) >= cells


def go(login: LoginNode) -> None:
    """Let cells that are held go on."""
    (login.folder / "go").touch()


def attempts(login: LoginNode) -> list[int]:
    return [cell["attempts"] for cell in login.status()["cells"]]


def ends(login: LoginNode) -> int:
    """How many attempts have ended."""
    return sum(map(len, login.events("ended").values()))


def finish(login: LoginNode, seconds: float = 120, never: tuple[str, ...] = ()) -> None:
    """Wait until every cell is done; no command helps. ``never`` are states that none may be in."""

    def done() -> bool:
        states = set(login.states())
        assert not states & set(never), login("status").stdout
        return states == {"done"}

    try:
        wait_until(done, seconds)
    except AssertionError:
        pytest.fail(login("status").stdout)


@pytest.mark.parametrize("coming_back", ["requeue", "chain"])
def test_a_time_limit_shorter_than_the_work(
    login: LoginNode, coming_back: str, undisturbed: dict[float, dict[int, float]]
) -> None:
    """The job gets its signal, saves, and the next segment continues, by itself."""
    login.site(coming_back=coming_back, links=6)
    # The signal comes after 15 to 45 s.
    recipe = descent(login, 0.9, resources={"time": "1m"})
    login("sweep", recipe, "--wait", timeout=400)
    assert losses(login.folder) == undisturbed
    assert min(attempts(login)) > 1
    signals = login.events("signal")
    assert {event["signal"] for events in signals.values() for event in events} == {"USR1"}
    assert len(login.jobs()) == (6 if coming_back == "chain" else 1)
    # Links that are not needed start no cell and end at once.
    before = attempts(login)
    wait_until(lambda: not login.queue(), 60)
    assert attempts(login) == before


def test_a_requeue_by_the_administrator(
    login: LoginNode, undisturbed: dict[float, dict[int, float]]
) -> None:
    """Requeued tasks get TERM, save, and come back once, and not twice."""
    recipe = descent(login, 0.0, held=True)
    login("sweep", recipe)
    wait_until(lambda: reached(login, HELD))
    (job,) = login.jobs()
    login.cluster.run("scontrol", "requeue", job)
    wait_until(lambda: ends(login) == 3)
    go(login)
    finish(login)
    assert losses(login.folder) == undisturbed
    assert attempts(login) == [2, 2, 2]


def test_scancel_ends_a_cell_for_good(login: LoginNode) -> None:
    """It gets TERM and saves; it must not requeue itself. The command given again continues."""
    recipe = descent(login, 0.0, held=True)
    login("sweep", recipe)
    wait_until(lambda: reached(login, HELD))
    (job,) = login.jobs()
    login.cluster.run("scancel", job)
    wait_until(lambda: not login.queue(), 60)
    # A job that had requeued itself would be in the queue, and its end would be no end.
    login.cluster.wait_accounted(job, ["CANCELLED by 0"] * 3)
    assert login.states() == ["stopped"] * 3
    assert not login.queue()
    go(login)
    login("sweep", recipe, "--wait")
    assert attempts(login) == [2, 2, 2]


@pytest.mark.parametrize("coming_back", ["requeue", "chain"])
def test_cancelled_cells_save_and_leave(login: LoginNode, coming_back: str) -> None:
    """The running one by the stop file, the waiting ones in the queue; later all continue."""
    login.site(coming_back=coming_back, links=3)
    recipe = descent(login, 0.0, held=True, array={"max_running": 1})
    login("sweep", recipe)
    wait_until(lambda: reached(login, HELD, cells=1))
    said = login("cancel", "descent").stdout
    assert said.count("asked to save and stop") == 1
    assert said.count("will not be started") == 2
    wait_until(lambda: not login.queue(), 30)
    assert login.states() == ["stopped"] * 3
    # As soon as the queue has let go of it.
    go(login)
    login("sweep", recipe, "--wait")
    assert sorted(attempts(login)) == [1, 1, 2]
    assert not any((cell / "stop").exists() for cell in login.cell_dirs())


@pytest.mark.slurm_alone
def test_a_job_of_higher_priority(
    login: LoginNode, undisturbed: dict[float, dict[int, float]]
) -> None:
    """Preempted jobs save, wait, and continue."""
    options = {"partition": "preempt", "nodelist": "n1"}
    recipe = descent(login, 0.0, held=True, slurm=options)
    login("sweep", recipe)
    wait_until(lambda: reached(login, HELD))
    other = login.cluster.submit(
        "-w", "n1", "--exclusive", "-t1", script="sleep 2", folder=login.folder
    )
    # Slurm's accounting has an end of them by now, and it is not theirs.
    login.cluster.wait(other, "RUNNING", "COMPLETED", timeout=90)
    go(login)
    finish(login, never=("lost", "failed", "stopped"))
    assert losses(login.folder) == undisturbed
    assert attempts(login) == [2, 2, 2]
    (job,) = login.jobs()
    login.cluster.wait_accounted(job, ["COMPLETED"] * 3)
    earlier = [entry["State"] for entry in login.cluster.sacct(job, "-D")][:3]
    assert set(earlier) <= {"PREEMPTED", "REQUEUED"}
    tasks = dict.fromkeys([(int(job), index) for index in range(3)], "COMPLETED")
    assert accounting([int(job)]) == tasks


@pytest.mark.slurm_alone
@pytest.mark.parametrize("warning", [False, True])
def test_a_node_is_lost(
    login: LoginNode, warning: bool, undisturbed: dict[float, dict[int, float]]
) -> None:
    """It is set down, or loses its power; Slurm starts its jobs again elsewhere."""
    options = {"sbatch": {"exclude": "n3,n4,n5,n6,n7,n8"}}
    recipe = descent(login, 0.0, held=True, slurm=options)
    login("sweep", recipe)
    wait_until(lambda: reached(login, HELD))
    (node,) = {events[0]["host"] for events in login.events("started").values()}
    if not warning:
        login.cluster.stop_daemon(node, kill=True)
    login.cluster.set_node(node, "down")
    wait_until(lambda: not of_folder(login.folder, "train.py"), what="the end on the node")
    go(login)
    finish(login)
    assert losses(login.folder) == undisturbed
    assert attempts(login) == [2, 2, 2]
    hosts = {event["host"] for events in login.events("started").values() for event in events}
    assert hosts == {"n1", "n2"}


@pytest.mark.slurm_alone
@pytest.mark.parametrize("kill", [False, True])
def test_the_controller_and_the_accounting_are_away(
    login: LoginNode, kill: bool, undisturbed: dict[float, dict[int, float]]
) -> None:
    """Cells go on; commands say what they cannot know, and submit nothing."""
    recipe = descent(login, 0.0, held=True)
    login("sweep", recipe)
    wait_until(lambda: reached(login, HELD))
    for task in range(3):  # what is killed forgets what it has not written down yet
        login.cluster.wait(f"{login.jobs()[0]}_{task}", "RUNNING")
    login.cluster.stop_daemon("slurmctld", kill=kill)
    login.cluster.stop_daemon("slurmdbd", kill=kill)
    said = login("status")
    assert "3 running" in said.stdout
    assert "from the run folder alone" in said.stderr
    assert "nothing is submitted" in login("sweep", recipe, code=2).stderr
    login.cluster.start_daemon("slurmctld")
    go(login)
    wait_until(lambda: reached(login, 60))
    login.cluster.start_daemon("slurmdbd")
    finish(login)
    login("sweep", recipe, "--wait")
    assert len(login.jobs()) == 1
    assert losses(login.folder) == undisturbed
    assert attempts(login) == [1, 1, 1]
