"""`hpcml sweep` of a program of the user's own, from the command line to the results."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import Hpcml, kill, of_folder, wait_until

# A deterministic "training" of 60 steps that saves every 10 and when it is asked to.
TRAIN = """
import json, os, pathlib, signal, sys, time
import hpcml

lr, pause = float(sys.argv[1]), float(sys.argv[2])
state_file = pathlib.Path(os.environ["HPCML_CHECKPOINTS"], "state.json")
stop = []
for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, lambda *_: stop.append(1))


def save():
    temporary = state_file.with_suffix(".new")
    temporary.write_text(json.dumps(state))
    os.replace(temporary, state_file)


state = {"step": 0, "x": 3.0}
if state_file.exists():
    state = json.loads(state_file.read_text())
while state["step"] < 60:
    state["step"] += 1
    state["x"] -= lr * (2 * state["x"] + 0.1 * state["step"] % 0.7)
    hpcml.report(step=state["step"], total_steps=60, loss=state["x"] ** 2)
    time.sleep(pause)
    if state["step"] % 10 == 0 or stop:
        save()
    if stop:
        sys.exit(75)
"""

RECIPE = """
name: descent
kind: command
params: {{pause: {pause}}}
sweep:
  grid:
    lr: [0.01, 0.03, 0.1]
objective: {{metric: loss, mode: min}}
command:
  run: [{python}, train.py, "{{{{ params.lr }}}}", "{{{{ params.pause }}}}"]
"""


def descent(hpcml: Hpcml, pause: float = 0.0) -> Path:
    hpcml.write("train.py", TRAIN)
    return hpcml.write("recipe.yaml", RECIPE.format(python=sys.executable, pause=pause))


def reported(hpcml: Hpcml) -> bool:
    """Whether a cell has reported a loss."""
    # Not the whole tree: the scratch folders of attempts come and go.
    found = hpcml.folder.glob("runs/*/*/cells/*/metrics.jsonl")
    return any("loss" in path.read_text() for path in found)


def losses(hpcml: Hpcml) -> dict[str, dict[int, float]]:
    """Every loss of every cell by step; the last line for a step counts."""
    found: dict[str, dict[int, float]] = {}
    for cell in hpcml.cell_dirs():
        lines = [json.loads(line) for line in (cell / "metrics.jsonl").read_text().splitlines()]
        found[cell.name] = {line["step"]: line["loss"] for line in lines}
    return found


def test_a_sweep_runs_and_ranks(hpcml: Hpcml) -> None:
    recipe = descent(hpcml)
    shown = hpcml("sweep", recipe).stdout
    assert "Best: cell" in shown
    rows = json.loads(hpcml("results", "--json").stdout)["cells"]
    assert [row["rank"] for row in rows] == [1, 2, 3]
    ranked = [row["metrics"]["loss"] for row in rows]
    assert ranked == sorted(ranked)
    status = hpcml.status("descent")
    assert {cell["state"] for cell in status["cells"]} == {"done"}
    wanted = {"id", "index", "state", "attempts", "params", "metrics", "reason"}
    assert wanted <= set(status["cells"][0])
    assert (hpcml.run_folder() / "results.parquet").exists()


def test_the_same_command_again_runs_nothing(hpcml: Hpcml) -> None:
    recipe = descent(hpcml)
    hpcml("sweep", recipe)
    before = {path: path.read_bytes() for path in hpcml.run_folder().rglob("events.jsonl")}
    hpcml("sweep", recipe)
    assert before == {path: path.read_bytes() for path in hpcml.run_folder().rglob("events.jsonl")}


def test_a_failed_cell_runs_again_and_the_others_do_not(hpcml: Hpcml) -> None:
    hpcml.write("script.py", "import os, sys; sys.exit(os.path.exists(sys.argv[1]))")
    (hpcml.folder / "broken2").touch()
    recipe = hpcml.write(
        "recipe.yaml",
        f"name: flaky\nkind: command\nsweep: {{grid: {{n: [1, 2, 3]}}}}\ncommand:\n"
        f"  run: [{sys.executable}, script.py, '{hpcml.folder}/broken{{{{ params.n }}}}']\n",
    )
    result = hpcml("sweep", recipe, code=1)
    assert "exit code 1" in result.stdout
    assert [cell["state"] for cell in hpcml.status()["cells"]] == ["done", "failed", "done"]
    (hpcml.folder / "broken2").unlink()
    hpcml("sweep", recipe)
    assert [cell["attempts"] for cell in hpcml.status()["cells"]] == [1, 2, 1]


def test_ctrl_c_saves_and_the_command_continues(hpcml: Hpcml) -> None:
    recipe = descent(hpcml, pause=0.1)
    sweep = hpcml.start("sweep", recipe)
    wait_until(lambda: reported(hpcml))
    sweep.send_signal(signal.SIGINT)
    out, err = sweep.communicate(timeout=30)
    assert sweep.returncode == 130, out + err
    assert "Give the command again" in out
    states = {cell["state"] for cell in hpcml.status()["cells"]}
    assert states <= {"stopped", "pending"}
    assert "stopped" in states
    hpcml("sweep", recipe)
    assert {cell["state"] for cell in hpcml.status()["cells"]} == {"done"}


def test_killed_at_random_moments_it_ends_the_same(hpcml: Hpcml, tmp_path: Path) -> None:
    """The command, a worker or a payload gets SIGKILL, 20 times; the losses stay the same."""
    calm = Hpcml(tmp_path / "calm")
    calm.folder.mkdir()
    calm("sweep", descent(calm, pause=0.05))
    chance = random.Random(20261130)
    recipe = descent(hpcml, pause=0.05)
    for _ in range(20):
        sweep = hpcml.start("sweep", recipe)
        time.sleep(chance.uniform(0.3, 1.6))
        victim = chance.choice(["command", "hpcml.worker", "train.py"])
        for pid in of_folder(hpcml.folder, victim)[:1] if victim != "command" else []:
            kill(pid)
        sweep.kill()
        sweep.communicate()
    hpcml("sweep", recipe)
    assert losses(hpcml) == losses(calm)


def test_a_time_limit_makes_segments(hpcml: Hpcml) -> None:
    recipe = descent(hpcml, pause=0.1)
    hpcml("sweep", recipe, "--set", "resources.time=4s", "--set", "sweep.grid.lr=[0.1]")
    (cell,) = hpcml.status()["cells"]
    assert cell["state"] == "done"
    assert cell["attempts"] > 1


def test_a_cancelled_cell_stays_so_until_the_next_command(hpcml: Hpcml) -> None:
    recipe = descent(hpcml, pause=0.2)
    sweep = hpcml.start("sweep", recipe, "--set", "array.max_running=1")
    wait_until(lambda: reported(hpcml))
    hpcml("cancel", "descent", "0")
    hpcml("cancel", "descent", "1")
    out, err = sweep.communicate(timeout=60)
    assert sweep.returncode == 1, out + err
    assert [cell["state"] for cell in hpcml.status()["cells"]] == ["stopped", "stopped", "done"]
    hpcml("sweep", recipe, "--set", "params.pause=0.2")
    assert {cell["state"] for cell in hpcml.status()["cells"]} == {"done"}


NASTY = [
    "plain",
    "with space",
    "'single' \"double\"",
    "$(touch /tmp/never) `id` ${HOME}",
    "a;b|c&d>e<f*?[x]",
    "line\nbreak\n",
    "tab\tand \\ backslash",
    "é漢字🎉\u2028",
    "{{ params.other }} {% raw %}",
    "-n",
    "#comment",
    "!history",
    "x" * 10_000,
]


def test_any_value_arrives_unchanged(hpcml: Hpcml) -> None:
    hpcml.write(
        "echo.py",
        "import json, os, sys\nprint(json.dumps([sys.argv[1], os.environ['VALUE']]))\n",
    )
    recipe = hpcml.write(
        "recipe.yaml",
        json.dumps(
            {
                "name": "values",
                "kind": "command",
                "sweep": {"grid": {"text": NASTY}},
                "env": {"VALUE": "{{ params.text }}", "MY_TOKEN": "not to be shown"},
                "command": {"run": [sys.executable, "echo.py", "{{ params.text }}"]},
            },
            ensure_ascii=False,
        ),
    )
    hpcml("sweep", recipe)
    seen = {}
    for cell in hpcml.status()["cells"]:
        out = hpcml.run_folder() / "cells" / cell["id"] / "log.1.out"
        seen[cell["index"]] = json.loads(out.read_text())
    assert [seen[index] for index in range(len(NASTY))] == [[value, value] for value in NASTY]
    # By hand each gets the same, and the run stays as it is.
    before = sorted(hpcml.run_folder().glob("cells/*/*"))
    for index in range(len(NASTY)):
        told = hpcml("why", "values", str(index)).stdout
        assert "not to be shown" not in told
        commands = told.partition("By hand")[2].partition("\n")[2]
        out = subprocess.run(["bash", "-c", commands], capture_output=True, text=True, check=True)
        assert json.loads(out.stdout) == [NASTY[index], NASTY[index]]
    assert sorted(hpcml.run_folder().glob("cells/*/*")) == before
    assert not Path("/tmp/never").exists()


def test_packing_runs_cells_side_by_side(hpcml: Hpcml) -> None:
    recipe = descent(hpcml, pause=0.02)
    hpcml("sweep", recipe, "--set", "array.pack=3")
    events = [
        json.loads((cell / "events.jsonl").read_text().splitlines()[0])
        for cell in hpcml.cell_dirs()
    ]
    assert {event["task"] for event in events} == {0}


def test_dry_run_prints_what_would_run_and_makes_nothing(hpcml: Hpcml) -> None:
    recipe = descent(hpcml)
    first = hpcml("sweep", recipe, "--dry-run").stdout
    assert not (hpcml.folder / "runs").exists()
    assert first == hpcml("sweep", recipe, "--dry-run").stdout
    hpcml("sweep", recipe)
    assert (hpcml.run_folder() / "scripts" / "001.sh").read_text() == first


def test_cells_run_from_the_snapshot(hpcml: Hpcml) -> None:
    recipe = descent(hpcml, pause=0.1)
    sweep = hpcml.start("sweep", recipe, "--set", "array.max_running=1")
    wait_until(lambda: reported(hpcml))
    hpcml.write("train.py", "raise SystemExit('edited while it runs')")
    sweep.communicate(timeout=120)
    assert sweep.returncode == 0


def test_a_repaired_script_is_used_by_the_next_command(hpcml: Hpcml) -> None:
    recipe = descent(hpcml)
    hpcml.write("train.py", "raise SystemExit('a bug')")
    assert "a bug" in hpcml("sweep", recipe, code=1).stdout
    descent(hpcml)
    hpcml("sweep", recipe)


def test_two_commands_do_not_run_the_same_cells(hpcml: Hpcml) -> None:
    recipe = descent(hpcml, pause=0.1)
    sweep = hpcml.start("sweep", recipe)
    wait_until(lambda: reported(hpcml))
    assert "another command" in hpcml("sweep", recipe, code=2).stderr
    sweep.communicate(timeout=120)
    assert sweep.returncode == 0


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
@pytest.mark.parametrize("options", ["size=64k", "ro"])
def test_a_runs_root_that_cannot_be_written_is_said(hpcml: Hpcml, options: str) -> None:
    recipe = descent(hpcml)
    disk = hpcml.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", disk], check=True)
    try:
        said = hpcml("sweep", recipe, "--root", disk / "runs", code=2).stderr
        assert ("read-only" if options == "ro" else "full") in said
        # What may stay is a run that is complete, which the command given again continues.
        assert not [path for path in disk.rglob("*") if path.name.startswith(".creating")]
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_fills_up_loses_nothing(hpcml: Hpcml) -> None:
    """The payload of the second cell fills the disk; what the first one has stays."""
    hpcml.write(
        "fill.py",
        "import os, pathlib, hpcml\n"
        "hpcml.report(step=1, loss=float(os.environ['HPCML_CELL_INDEX']))\n"
        "if os.environ['HPCML_CELL_INDEX'] == '1':\n"
        "    with open(os.environ['HPCML_CELL_DIR'] + '/ballast', 'wb') as file:\n"
        "        file.write(b'x' * 3_000_000)\n",
    )
    recipe = hpcml.write(
        "recipe.yaml",
        "name: full\nkind: command\nsweep: {grid: {n: [0, 1, 2]}}\narray: {max_running: 1}\n"
        f"objective: {{metric: loss}}\ncommand: {{run: [{sys.executable}, fill.py]}}\n",
    )
    disk = hpcml.folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "none", disk], check=True)
    try:
        result = hpcml("sweep", recipe, "--root", disk / "runs", code=None)
        assert result.returncode in (1, 2)
        assert "No space left" in result.stdout + result.stderr or "full" in result.stderr
        subprocess.run(["mount", "-o", "remount,size=20m", disk], check=True)
        hpcml("sweep", recipe, "--root", disk / "runs")
        cells = json.loads(hpcml("status", "--json", "--root", disk / "runs").stdout)["cells"]
        assert [cell["metrics"]["loss"] for cell in cells] == [0, 1, 2]
        assert cells[0]["attempts"] == 1
    finally:
        subprocess.run(["umount", disk], check=True)


def test_secrets_reach_the_payload_and_no_file(hpcml: Hpcml) -> None:
    secret = "s3cr3t-value-of-a-token"
    hpcml.write("check.py", "import os, sys; sys.exit(len(os.environ['TOKEN']) != 23)")
    recipe = hpcml.write(
        "recipe.yaml",
        f"name: secret\nkind: command\nenv_from: [TOKEN]\n"
        f"command: {{run: [{sys.executable}, check.py]}}\n",
    )
    assert "TOKEN" in hpcml("sweep", recipe, code=2).stderr
    hpcml.environment["TOKEN"] = secret
    hpcml("sweep", recipe)
    for path in hpcml.run_folder().rglob("*"):
        assert not path.is_file() or secret.encode() not in path.read_bytes(), path


def test_a_cell_may_run_a_sweep_itself(hpcml: Hpcml) -> None:
    """With the hpcml and the files of its own run; the new run lies beside it."""
    descent(hpcml)
    inner = [sys.executable, "-m", "hpcml", "sweep", "recipe.yaml", "--site", "local"]
    recipe = {"name": "outer", "kind": "command", "command": {"run": inner}}
    del hpcml.environment["PYTHONPATH"]
    hpcml.environment["SLURM_NODEID"] = "1"  # as in a job of several nodes
    hpcml("sweep", hpcml.write("outer.yaml", json.dumps(recipe)), "--site", "local")
    assert hpcml.status("descent")["states"] == {"done": 3}
    assert {path.name for path in (hpcml.folder / "runs").iterdir()} >= {"outer", "descent"}
