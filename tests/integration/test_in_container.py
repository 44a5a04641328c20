"""Cells in a real Apptainer image, on this machine and on a real Slurm."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tests.cluster.fixtures import SlurmCluster, host_python_binds
from tests.conftest import Hpcml, kill, kill_everything_of, of_folder, wait_until
from tests.infer_models import make_model, questions

# Shells, other programs' syntax, and the runtime's own evaluation of variables.
NASTY = [
    "with space",
    "'single' \"double\"",
    "$(touch /tmp/never) `id` ${HOME} $HOME",
    "a;b|c&d>e<f*?[x]",
    "line\nbreak\n",
    "tab\tand \\ backslash \\$HOME \\n",
    "é漢字🎉\u2028",
    "key=value,other:ro",
    "-n",
    "x" * 10_000,
]
SECRET = "s3cr3t $(touch /tmp/never) `id` \\$HOME 'a' \"b\""

TELL = """
import json, os, sys, site
print(json.dumps({"argv": sys.argv[1:], "env": dict(os.environ), "cwd": os.getcwd(),
                  "prefix": sys.prefix, "user": site.ENABLE_USER_SITE, "path": sys.path}))
"""

# Saves a step at a time, and what asked it to stop.
DESCENT = """
import os, pathlib, signal, sys, time, hpcml
asked = []
for name in ("USR1", "TERM"):
    signal.signal(getattr(signal, "SIG" + name), lambda *_, name=name: asked.append(name))
state = pathlib.Path(os.environ["HPCML_CELL_DIR"], "state")
step = int(state.read_text()) if state.exists() else 0
while step < int(sys.argv[1]):
    step += 1
    time.sleep(float(sys.argv[2]))
    state.write_text(str(step))
    hpcml.report(step=step, loss=1 / step)
    if asked:
        print("asked by", *asked, flush=True)
        # The runtime passes TERM on as well, a little later, and an ending Python would die of it.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(75)
"""


@pytest.fixture
def image(hpcml: Hpcml, apptainer: Path) -> Path:
    """The image, and the site ``here.yaml`` that can run it."""
    site(hpcml)
    return apptainer


def site(hpcml: Hpcml, *options: str, **more: Any) -> None:
    container = {"runtime": "apptainer", "options": list(options), "env": {"OF_SITE": "a 'b' $c"}}
    text = {"name": "here", "scheduler": "local", "container": container, "env": {"PLAIN": "p q"}}
    hpcml.write("here.yaml", json.dumps({**text, **more}))


def recipe(hpcml: Hpcml, image: Path, run: list[str], **more: Any) -> Path:
    container = {"image": str(image), **more.pop("container", {})}
    text = {"name": "x", "kind": "command", "container": container, "command": {"run": run}, **more}
    return hpcml.write("recipe.yaml", json.dumps(text, ensure_ascii=False))


def sweep(hpcml: Hpcml, path: Path, *arguments: str, code: int = 0) -> str:
    return hpcml("sweep", path, "--site", hpcml.folder / "here.yaml", *arguments, code=code).stdout


def told(hpcml: Hpcml) -> list[dict[str, Any]]:
    """What the cells printed, in their order."""
    found = {}
    for cell in hpcml.status()["cells"]:
        out = hpcml.run_folder() / "cells" / cell["id"] / f"log.{cell['attempts']}.out"
        found[cell["index"]] = json.loads(out.read_text())
    return [found[index] for index in sorted(found)]


@pytest.mark.parametrize("options", [(), ("--cleanenv",), ("-C",)], ids=["plain", "clean", "all"])
def test_values_secrets_and_gpus_reach_the_inside(
    hpcml: Hpcml, image: Path, options: tuple[str, ...]
) -> None:
    site(hpcml, *options)
    hpcml.write("tell.py", TELL)
    hpcml.environment.update(TOKEN=SECRET, SLURM_PROCID="7")
    path = recipe(
        hpcml,
        image,
        ["python3", "tell.py", "{{ params.text }}"],
        sweep={"grid": {"text": NASTY}},
        env={"VALUE": "{{ params.text }}"},
        env_from=["TOKEN"],
        array={"pack": len(NASTY)},
        container={"env": {"OF_RECIPE": SECRET, "OF_SITE": "mine"}},
    )
    sweep(hpcml, path)
    for value, seen in zip(NASTY, told(hpcml), strict=True):
        environment = seen["env"]
        assert seen["argv"] == [value]
        assert environment["VALUE"] == value
        assert environment["TOKEN"] == environment["OF_RECIPE"] == SECRET
        assert environment["OF_SITE"] == "mine"
        assert environment["PLAIN"] == "p q"
        assert environment["SLURM_PROCID"] == "7"
        assert seen["prefix"] == "/usr"
        assert Path(seen["cwd"]).is_relative_to(hpcml.run_folder())
    assert not Path("/tmp/never").exists()
    for file in hpcml.run_folder().rglob("tasks/*"):
        assert "s3cr3t" not in file.read_text()


def test_each_cell_keeps_its_gpu(hpcml: Hpcml, image: Path) -> None:
    site(hpcml, "--cleanenv")
    hpcml.write("tell.py", TELL)
    hpcml.environment["CUDA_VISIBLE_DEVICES"] = "GPU-a,GPU-b"
    path = recipe(
        hpcml,
        image,
        ["python3", "tell.py"],
        sweep={"grid": {"n": [0, 1]}},
        resources={"gpus": 1},
        array={"pack": 2},
    )
    sweep(hpcml, path)
    seen = [entry["env"]["CUDA_VISIBLE_DEVICES"] for entry in told(hpcml)]
    assert sorted(seen) == ["GPU-a", "GPU-b"]


def test_exit_codes_and_missing_programs(hpcml: Hpcml, image: Path) -> None:
    run = ["sh", "-c", "exit {{ params.code }}"]
    path = recipe(hpcml, image, run, sweep={"grid": {"code": [0, 3]}})
    assert "exit code 3" in sweep(hpcml, path, code=1)
    path = recipe(hpcml, image, ["no-such-program"])
    assert "no-such-program" in sweep(hpcml, path, code=1)


def test_binds_with_any_name_and_no_others(hpcml: Hpcml, image: Path) -> None:
    names = ["a b", "a,b", "a:b", 'it\'s "q"', "back\\slash", "é漢"]
    binds = []
    for number, name in enumerate(names):
        hpcml.write(f"data/{name}/number", str(number))
        source = str(hpcml.folder / "data" / name).replace(":", "\\:")
        binds.append(f"{source}:/in/{name.replace(':', chr(92) + ':')}:ro")
    hpcml.write(
        "read.py",
        "import os, sys\n"
        f"for number, name in enumerate({names!r}):\n"
        "    assert open(f'/in/{name}/number').read() == str(number)\n"
        "    try: open(f'/in/{name}/new', 'w')\n"
        "    except OSError: pass\n"
        "    else: sys.exit('written')\n",
    )
    path = recipe(hpcml, image, ["python3", "read.py"], container={"binds": binds})
    runs = hpcml.folder / 'it\'s, "my" runs'
    sweep(hpcml, path, "--root", str(runs))
    path = recipe(hpcml, image, ["true"], container={"binds": ["/no/such/folder"]})
    said = hpcml("sweep", path, "--site", hpcml.folder / "here.yaml", code=2).stderr
    assert "container.binds.0: there is no /no/such/folder" in said


def test_packages_of_the_user_do_not_shadow_those_of_the_image(hpcml: Hpcml, image: Path) -> None:
    for version in range(9, 15):
        hpcml.write(f"home/.local/lib/python3.{version}/site-packages/json.py", "raise SystemExit")
        hpcml.write(f"home/.local/lib/python3.{version}/site-packages/mine.py", "")
    hpcml.environment["APPTAINER_HOME"] = str(hpcml.folder / "home")
    hpcml.write("tell.py", TELL)
    check = "import tell; __import__('importlib').util.find_spec('mine') and exit('shadowed')"
    path = recipe(hpcml, image, ["python3", "-c", f"import importlib.util; {check}"])
    sweep(hpcml, path)
    (seen,) = told(hpcml)
    assert seen["env"]["HOME"] == str(hpcml.folder / "home")
    assert seen["user"] is False
    assert str(hpcml.folder / "runs") in seen["path"][1]


@pytest.mark.parametrize("options", [(), ("-C",), ("--userns", "--pid")])
def test_ctrl_c_saves_and_the_command_continues(
    hpcml: Hpcml, image: Path, options: tuple[str, ...]
) -> None:
    site(hpcml, *options)
    hpcml.write("descent.py", DESCENT)
    path = recipe(hpcml, image, ["python3", "descent.py", "8", "0.3"])
    command = hpcml.start("sweep", path, "--site", hpcml.folder / "here.yaml")
    wait_until(lambda: metrics(hpcml))
    command.send_signal(signal.SIGINT)
    out, err = command.communicate(timeout=60)
    assert command.returncode == 130, out + err
    (cell,) = hpcml.cell_dirs()
    assert (cell / "log.1.out").read_text() == "asked by USR1\n"
    events = [json.loads(line) for line in (cell / "events.jsonl").read_text().splitlines()]
    assert [(event["code"], event["cause"]) for event in events if event["event"] == "ended"] == [
        (75, "stopped")
    ]
    sweep(hpcml, path)
    assert hpcml.status()["cells"][0]["attempts"] == 2


@pytest.mark.parametrize("options", [(), ("-C",)])
def test_killing_the_command_leaves_nothing_behind(
    hpcml: Hpcml, image: Path, options: tuple[str, ...]
) -> None:
    site(hpcml, *options)
    hpcml.write("descent.py", DESCENT)
    path = recipe(hpcml, image, ["python3", "descent.py", "6", "0.3"])
    command = hpcml.start("sweep", path, "--site", hpcml.folder / "here.yaml")
    wait_until(lambda: metrics(hpcml))
    kill_everything_of(command)
    wait_until(lambda: not processes_of(hpcml.folder), 30, "the end of all processes")
    sweep(hpcml, path)
    assert metrics(hpcml)[-1]["step"] == 6


def test_a_signal_during_the_start_loses_nothing(hpcml: Hpcml, image: Path) -> None:
    """The runtime ignores signals, or dies of them, until the container is there."""
    hpcml.write("descent.py", DESCENT)
    there = hpcml.folder / "there"
    site(hpcml, setup=[f"touch {there}"])
    path = recipe(hpcml, image, ["python3", "descent.py", "400", "0.05"])
    command = hpcml.start("sweep", path, "--site", hpcml.folder / "here.yaml")
    wait_until(lambda: metrics(hpcml))
    command.send_signal(signal.SIGINT)
    command.communicate(timeout=60)
    for pause in (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.3, 0.4):
        there.unlink()
        for cell in hpcml.cell_dirs():  # as if nothing had run yet
            shutil.rmtree(cell)
        batch = subprocess.Popen(
            ["bash", hpcml.run_folder() / "scripts" / "001.sh"],
            env={**hpcml.environment, "HPCML_TASK": "0"},
            start_new_session=True,
        )
        wait_until(there.exists)
        time.sleep(pause)
        batch.send_signal(signal.SIGUSR1)
        assert batch.wait(timeout=60) == 75
    wait_until(lambda: not processes_of(hpcml.folder), 10, "the end of all processes")


def metrics(hpcml: Hpcml) -> list[dict[str, Any]]:
    lines = [
        line
        for file in hpcml.folder.glob("runs/*/*/cells/*/metrics.jsonl")
        for line in file.read_text().splitlines()
    ]
    return [json.loads(line) for line in lines]


def has_double(numbers: list[int]) -> bool:
    return len(numbers) > len(set(numbers))


def processes_of(folder: Path) -> list[str]:
    """Processes that belong to a run in ``folder``, by their command line or environment."""
    found = []
    for name in os.listdir("/proc"):
        try:
            command = Path("/proc", name, "cmdline").read_bytes()
            environment = Path("/proc", name, "environ").read_bytes()
        except OSError:
            continue
        if name != str(os.getpid()) and str(folder).encode() in command + environment:
            found.append(command.decode(errors="replace"))
    return found


def slurm_site(hpcml: Hpcml, *options: str) -> None:
    hpcml.write(
        "here.yaml",
        "name: here\nscheduler: slurm\nsignal: {name: USR1, lead: 30s}\n"
        f"python: {sys.executable}\n"
        f"container: {{runtime: apptainer, options: {json.dumps(['--cleanenv', *options])}}}\n",
    )


def all_done(hpcml: Hpcml) -> bool:
    return all(cell["state"] == "done" for cell in hpcml.status()["cells"])


def test_an_array_in_apptainer_requeues_itself(
    hpcml: Hpcml, image: Path, slurm_cluster: SlurmCluster
) -> None:
    """The time is over after a minute: a signal, a checkpoint, and scontrol outside the image."""
    hpcml.write("descent.py", DESCENT)
    slurm_site(hpcml)
    shown = "$CUDA_VISIBLE_DEVICES $SLURM_JOB_NUM_NODES"
    path = recipe(
        hpcml,
        image,
        ["sh", "-c", f"echo {shown}; exec python3 descent.py 60 1"],
        sweep={"grid": {"n": [0, 1]}},
        resources={"gpus": 1, "time": "1m"},
    )
    sweep(hpcml, path)
    wait_until(lambda: all_done(hpcml), 300, "the end")
    for cell in hpcml.status()["cells"]:
        assert cell["attempts"] >= 2
        out = (hpcml.run_folder() / "cells" / cell["id"] / "log.1.out").read_text()
        device, nodes = out.split("\n")[0].split()
        assert device.isdigit()
        assert nodes == "1"
        assert "asked by USR1" in out


def test_a_cell_on_two_nodes_has_an_image_on_each(
    hpcml: Hpcml, image: Path, slurm_cluster: SlurmCluster
) -> None:
    """The variables that srun gives each node are those of that node inside, too."""
    hpcml.write("tell.py", TELL)
    slurm_site(hpcml)
    path = recipe(hpcml, image, ["python3", "tell.py"], resources={"nodes": 2, "gpus": 2})
    sweep(hpcml, path)
    wait_until(lambda: all_done(hpcml), 120, "the end")
    found = [json.loads(out.read_text()) for out in hpcml.cell_dirs()[0].glob("log.1*.out")]
    names = ("RANK", "SLURM_NODEID", "SLURM_PROCID")
    ranks = sorted([entry["env"][name] for name in names] for entry in found)
    assert ranks == [["0", "0", "0"], ["1", "0", "0"], ["2", "1", "1"], ["3", "1", "1"]]
    assert all(len(entry["env"]["CUDA_VISIBLE_DEVICES"].split(",")) == 2 for entry in found)


def test_term_saves_on_all_nodes(hpcml: Hpcml, image: Path, slurm_cluster: SlurmCluster) -> None:
    """srun kills its tasks when it gets TERM, so it must not get it."""
    hpcml.write("descent.py", DESCENT)
    slurm_site(hpcml)
    path = recipe(hpcml, image, ["python3", "descent.py", "400", "0.1"], resources={"nodes": 2})
    sweep(hpcml, path)
    # Both ranks are at work where a step comes twice.
    wait_until(lambda: has_double([line["step"] for line in metrics(hpcml)]), 120)
    journal = (hpcml.run_folder() / "submissions.jsonl").read_text().splitlines()
    (job,) = [json.loads(line)["job"] for line in journal if '"submitted"' in line]
    slurm_cluster.run("scancel", "--batch", "--signal=TERM", f"{job}_0")
    (cell,) = hpcml.cell_dirs()
    wait_until(lambda: '"ended"' in (cell / "events.jsonl").read_text(), 60, "the end")
    (ended,) = [
        line for line in (cell / "events.jsonl").read_text().splitlines() if "ended" in line
    ]
    assert (json.loads(ended)["code"], json.loads(ended)["cause"]) == (75, "stopped")
    assert "asked by USR1" in (cell / "log.1.out").read_text()
    slurm_cluster.run("scancel", str(job))


def test_an_inference_shared_by_two_images(
    hpcml: Hpcml,
    image: Path,
    slurm_cluster: SlurmCluster,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """One engine dies inside; the answers are those of a run outside of any image."""
    pytest.importorskip("torch", reason="the engine transformers is not installed")
    rows = 400
    plain = Hpcml(tmp_path_factory.mktemp("plain"))
    model = make_model(hpcml.folder / "model")
    infer = {
        "model": str(model),
        "input": {"files": "in.jsonl", "key": "id"},
        "prompt": "{{ question }}",
        "engine_args": {"dtype": "float32"},
        "shard_rows": 16,
    }
    text = {
        "name": "ask",
        "kind": "infer",
        "params": {"temperature": 0, "max_tokens": 24},
        "resources": {"time": "5m"},
        "retry": {"killed": 5},
    }
    lines = [json.dumps({"id": f"k{n}", "question": q}) for n, q in enumerate(questions(rows))]
    for here in (plain, hpcml):
        here.environment["OMP_NUM_THREADS"] = "1"
        here.write("in.jsonl", "\n".join(lines))
    slurm_site(hpcml, *host_python_binds())
    container = {"image": str(image), "python": sys.executable}
    hpcml.write(
        "ask.yaml", json.dumps({**text, "container": container, "infer": {**infer, "workers": 2}})
    )
    hpcml("infer", "--batch", "ask.yaml", "--site", hpcml.folder / "here.yaml")
    parts = "runs/*/*/cells/*/rounds/1/parts/*.arrow"
    wait_until(lambda: any(hpcml.folder.glob(parts)), 120, "the first shard")
    inside = of_folder(hpcml.folder, "hpcml.infer.process")
    assert inside, "all shards were answered before anything could be killed"
    assert all(in_image(pid) for pid in inside)
    kill(inside[0])
    wait_until(lambda: all_done(hpcml), 240, "the end")
    plain.write("ask.yaml", json.dumps({**text, "infer": infer}))
    plain("infer", "--batch", "ask.yaml")
    proof, mine = answered(hpcml)
    assert (proof["rows_in"], proof["rows_out"], proof["duplicates"]) == (rows, rows, 0)
    assert mine == answered(plain)[1]
    logs = hpcml.cell_dirs()[0].glob("workers/*/log.*.out")
    assert any("the engine died (signal 9)" in log.read_text() for log in logs)


def in_image(pid: int) -> bool:
    """Whether the root of a process is another one than ours."""
    return os.stat(f"/proc/{pid}/root/").st_dev != os.stat("/").st_dev


def answered(hpcml: Hpcml) -> tuple[dict[str, Any], list[tuple[Any, ...]]]:
    """The proof of an inference, and its answers."""
    (cell,) = hpcml.cell_dirs()
    rows = pq.read_table(cell / "output.parquet").to_pylist()
    return (
        json.loads((cell / "merge.json").read_text()),
        [(row["key"], row["answer"], row["output_tokens"]) for row in rows],
    )
