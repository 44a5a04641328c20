"""What cells find on a node of Slurm."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.conftest import wait_until
from tests.integration.slurm.conftest import LoginNode

# Writes what it got into the cell's folder.
TELL = """
import json, os, pathlib, sys
cell = pathlib.Path(os.environ["HPCML_CELL_DIR"])
rank = os.environ["RANK"]
told = {"argv": sys.argv[1:], "env": dict(os.environ), "host": os.uname().nodename,
        "cwd": os.getcwd()}
(cell / f"told.{rank}").write_text(json.dumps(told))
sys.exit(sys.argv[1:2] == ["fail"])
"""

# Waits to be asked to stop, and saves who asked; the second time there is nothing to do.
RANKS = """
import os, pathlib, signal, sys, time
cell = pathlib.Path(os.environ["HPCML_CELL_DIR"])
saved = cell / f"saved.{os.environ['RANK']}"
asked = []
for name in ("USR1", "TERM"):
    signal.signal(getattr(signal, f"SIG{name}"), lambda *_, name=name: asked.append(name))
(cell / f"began.{os.environ['RANK']}").touch()
while os.environ["HPCML_ATTEMPT"] == "1":
    time.sleep(0.1)
    if asked:
        saved.write_text(asked[0])
        sys.exit(75)
"""


def told(cell: Path, rank: int = 0) -> dict:
    return json.loads((cell / f"told.{rank}").read_text())


def test_values_arrive_unchanged(login: LoginNode) -> None:
    """Spaces, quotes, commands, line breaks, other alphabets and 10 kB are only text."""
    login.write("tell.py", TELL)
    values = [
        "two words",
        'it\'s "quoted" `twice`',
        "$(touch pwned); touch pwned & $HOME ${HOME} !! \\ \\n * ? ~ # %j %A",
        "line\nbreak\r\n\ttab",
        "Grüße 日本語 🙂 \u2028 \u0085 end",
        "-rf",
        "",
        "x" * 10_000,
    ]
    recipe = login.recipe(
        "values",
        [sys.executable, "tell.py", "{{ params.n }}"],
        values,
        env={"VALUE": "{{ params.n }}"},
        array={"pack": 8},
    )
    login("sweep", recipe, "--wait")
    found = {}
    for cell in login.cell_dirs():
        got = told(cell)
        assert [got["env"]["VALUE"]] == got["argv"]
        found[json.loads((cell / "cell.json").read_text())["params"]["n"]] = got["argv"][0]
    assert found == {value: value for value in values}
    assert not list(login.folder.rglob("pwned"))


def test_eight_cells_share_a_node(login: LoginNode) -> None:
    """Each has its GPU, its folders and its port; one that fails hurts no other."""
    login.write("tell.py", TELL)
    recipe = login.recipe(
        "packed",
        [sys.executable, "tell.py", "{{ 'fail' if params.n == 3 else 'go' }}"],
        list(range(8)),
        resources={"gpus": 1},
        array={"pack": 8},
        slurm={"exclusive": True},
    )
    login("sweep", recipe, "--wait", code=1)
    assert login.states() == ["done"] * 3 + ["failed"] + ["done"] * 4
    environments = [told(cell)["env"] for cell in login.cell_dirs()]
    assert {one["CUDA_VISIBLE_DEVICES"] for one in environments} == set("01234567")
    for name in ("MASTER_PORT", "TMPDIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"):
        assert len({one[name] for one in environments}) == 8
    assert {one["PYTHONNOUSERSITE"] for one in environments} == {"1"}
    assert {one["SLURM_JOB_ID"] for one in environments} == {login.jobs()[0]}
    assert len(login.jobs()) == 1


def test_ranks_on_two_nodes(login: LoginNode) -> None:
    """One worker for each node, which gets the cores of all its ranks."""
    login.write("tell.py", TELL)
    recipe = login.recipe(
        "ranks",
        [sys.executable, "tell.py"],
        [1],
        resources={"nodes": 2, "processes": 2, "cpus": 3, "gpus": 2},
    )
    login("sweep", recipe, "--wait")
    (cell,) = login.cell_dirs()
    ranks = [told(cell, rank) for rank in range(4)]
    assert [rank["env"]["WORLD_SIZE"] for rank in ranks] == ["4"] * 4
    assert [rank["env"]["LOCAL_RANK"] for rank in ranks] == ["0", "1", "0", "1"]
    assert ranks[0]["host"] == ranks[1]["host"] != ranks[2]["host"] == ranks[3]["host"]
    assert {rank["env"]["MASTER_ADDR"] for rank in ranks} == {ranks[0]["host"]}
    assert len({rank["env"]["MASTER_PORT"] for rank in ranks}) == 1
    assert {rank["env"]["OMP_NUM_THREADS"] for rank in ranks} == {"3"}
    # Slurm 22.05 and later does not hand it on to steps by itself.
    assert {rank["env"]["SLURM_CPUS_PER_TASK"] for rank in ranks} == {"6"}
    # Those of its node, which may not be its only job's.
    devices = [rank["env"]["CUDA_VISIBLE_DEVICES"] for rank in ranks]
    assert [len(visible.split(",")) for visible in devices] == [2] * 4
    assert (devices[0], devices[2]) == (devices[1], devices[3])


def test_a_signal_reaches_the_ranks_of_both_nodes(login: LoginNode) -> None:
    """Through srun, which keeps some signals to itself; all save, and the job comes back."""
    login.write("train.py", RANKS)
    recipe = login.recipe(
        "both", [sys.executable, "train.py"], [1], resources={"nodes": 2, "processes": 2}
    )
    login("sweep", recipe)
    wait_until(lambda: len(list(login.folder.glob("runs/both/*/cells/*/began.*"))) == 4)
    login.cluster.run("scancel", "--batch", "--signal=USR1", f"{login.jobs()[0]}_0")
    wait_until(lambda: login.states() == ["done"], 120)
    (cell,) = login.cell_dirs()
    assert {file.read_text() for file in cell.glob("saved.*")} == {"USR1"}
    assert len(list(cell.glob("saved.*"))) == 4
    assert [end["cause"] for end in login.events("ended")[cell.name]] == ["stopped", "done"]


def test_a_signal_before_the_second_node_is_there(login: LoginNode) -> None:
    """Its worker has not begun, and dies of it. The first one does not wait for ever."""
    login.write("train.py", RANKS)
    slow = login.write(
        "python",
        "#!/bin/sh\n"
        f'if [ "$SLURM_NODEID" = 1 ] && mkdir {login.folder}/once 2>/dev/null; then sleep 300; fi\n'
        f'exec {sys.executable} "$@"\n',
    )
    slow.chmod(0o755)
    site = login.folder / "site_configs" / "cluster.yaml"
    site.write_text(site.read_text() + f"python: {slow}\n")
    recipe = login.recipe("late", [sys.executable, "train.py"], [1], resources={"nodes": 2})
    login("sweep", recipe)
    began = login.folder / "once"
    wait_until(lambda: began.exists() and list(login.folder.glob("runs/late/*/cells/*/began.0")))
    login.cluster.run("scancel", "--batch", "--signal=USR1", f"{login.jobs()[0]}_0")
    wait_until(lambda: login.states() == ["done"], 240)
    (cell,) = login.cell_dirs()
    assert [end["cause"] for end in login.events("ended")[cell.name]] == ["stopped", "done"]
