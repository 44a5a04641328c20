"""The command line on a site with Volcano: what is said, and what reaches the server."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.conftest import Hpcml
from tests.volcano_schema import problems
from tests.volcano_server import VolcanoServer


@pytest.fixture
def server() -> Iterator[VolcanoServer]:
    found = VolcanoServer()
    yield found
    found.stop()


@pytest.fixture
def place(hpcml: Hpcml, server: VolcanoServer, tmp_path: Path) -> Hpcml:
    hpcml.write(
        "site.yaml",
        f"name: kube\nscheduler: volcano\npython: python3\nruns: {hpcml.folder}/runs\n"
        f"volcano:\n  namespace: ml\n  kubeconfig: {server.kubeconfig(tmp_path)}\n"
        f"  image: x\n  volumes: [{{path: {hpcml.folder}, claim: shared}}]\n",
    )
    hpcml.write(
        "recipe.yaml",
        "name: some\nkind: command\nsweep: {grid: {n: [0, 1, 2]}}\ncommand: {run: [echo]}\n",
    )
    return hpcml


def test_from_the_preview_to_the_end(place: Hpcml, server: VolcanoServer) -> None:
    shown = place("sweep", "recipe.yaml", "--site", "site.yaml", "--dry-run")
    (job,) = yaml.safe_load_all(shown.stdout)
    assert problems(job) == []
    assert '# "$HPCML_PYTHON" -m hpcml.worker' in shown.stdout
    assert "3 tasks, in 1 job of 3 pods together" in shown.stderr
    assert server.calls == []
    assert not (place.folder / "runs").exists()

    done = place("sweep", "recipe.yaml", "--site", "site.yaml")
    (name,) = server.jobs
    assert name == job["metadata"]["name"]
    assert f"submitted as {name}" in done.stdout
    assert server.jobs[name]["spec"] == job["spec"]

    again = place("sweep", "recipe.yaml", "--site", "site.yaml")
    assert "3 done or queued before, 0 left to run" in again.stderr
    assert list(server.jobs) == [name]

    server.phase(name, "Running", running=1)
    server.pod(f"{name}-task-0", name, "Running")
    status = place("status", "some", "--root", "runs")
    assert "3 pending" in status.stdout
    assert "waits to be looked at by the scheduler" in status.stdout
    no_logs = place("logs", "some", "1", "--root", "runs", code=2)
    assert "waits to be looked at by the scheduler" in no_logs.stderr

    place("cancel", "some", "--root", "runs")
    assert server.jobs == {}
    # The command given again is a submission of its own.
    place("sweep", "recipe.yaml", "--site", "site.yaml")
    assert list(server.jobs) == [name.replace("-1-0", "-2-0")]


def test_a_server_that_refuses(place: Hpcml, server: VolcanoServer) -> None:
    server.objects["queues"].clear()
    refused = place("sweep", "recipe.yaml", "--site", "site.yaml", code=2)
    assert "nothing is submitted" in refused.stderr
    assert "unable to find job queue: default" in refused.stderr
    assert "Traceback" not in refused.stderr
    checked = place("site", "check", "site.yaml", code=1)
    assert "FAIL     queue default" in checked.stdout
    assert "ok       server" in checked.stdout


def test_stages_wait_for_the_command(place: Hpcml, server: VolcanoServer) -> None:
    place.write(
        "staged.yaml",
        "name: two\nstages:\n"
        "  one: {kind: command, command: {run: [echo]}}\n"
        "  two: {needs: [one], kind: command, command: {run: [echo]}}\n",
    )
    said = place("sweep", "staged.yaml", "--site", "site.yaml").stderr
    assert "two.two begins when two.one is done" in said
    assert [job["metadata"]["annotations"]["hpcml-submission"] for job in server.jobs.values()] == [
        "1"
    ]
    (run,) = (place.folder / "runs" / "two.one").iterdir()
    ids = [line.split('"id":"')[1].split('"')[0] for line in (run / "cells.jsonl").open()]
    (run / "cells" / ids[0]).mkdir()
    (run / "cells" / ids[0] / "result.json").write_text("{}")
    place("sweep", "staged.yaml", "--site", "site.yaml")
    assert sorted(name.split("-")[1] for name in server.jobs) == ["one", "two"]


def test_a_round_is_proposed_and_submitted_when_the_one_before_is_over(
    place: Hpcml, server: VolcanoServer
) -> None:
    place.write(
        "sought.yaml",
        "name: sought\nkind: command\ncommand: {run: [echo, '{{ params.x }}']}\nsweep:\n"
        "  search: {metric: loss, rounds: 2, cells: 3, params: {x: {uniform: [0, 1]}}}\n",
    )
    sweep = ("sweep", "sought.yaml", "--site", "site.yaml")
    assert "a round begins when the one before is over" in place(*sweep).stderr
    (first,) = server.jobs
    # While it is queued, nothing is added.
    assert "0 left to run" in place(*sweep).stderr
    (run,) = (place.folder / "runs" / "sought").iterdir()
    assert [path.name for path in (run / "rounds").iterdir()] == ["1.json"]
    cells = place.status("sought")["cells"]
    assert ["x" in cell["params"] for cell in cells] == [True] * 3 + [False] * 3
    assert cells[3]["reason"] == "to be proposed in round 2"
    for cell in cells[:3]:
        folder = run / "cells" / cell["id"]
        folder.mkdir(parents=True)
        result = {"metrics": {"loss": cell["params"]["x"]}, "step": None}
        (folder / "result.json").write_text(json.dumps(result))
    server.phase(first, "Completed", succeeded=3)
    place(*sweep)
    (second,) = set(server.jobs) - {first}
    assert server.jobs[second]["spec"]["tasks"][0]["replicas"] == 3
    assert json.loads((run / "submissions" / "002.json").read_text())["cells"] == [[3, 5]]
    proposal = json.loads((run / "rounds" / "2.json").read_text())
    assert proposal["from"] == [[cell["params"]["x"] for cell in cells[:3]]]


def test_more_workers_share_an_inference(place: Hpcml, server: VolcanoServer) -> None:
    (place.folder / "model").mkdir()
    place.write("model/config.json", '{"model_type": "llama"}')
    place.write("rows.jsonl", '{"text": "a"}\n')
    place.write(
        "infer.yaml",
        "name: answers\nkind: infer\n"
        "infer: {model: model, input: {files: rows.jsonl}, prompt: '{{ text }}', workers: 2}\n",
    )
    begin = ("infer", "--batch", "infer.yaml", "--site", "site.yaml")
    place(*begin)
    assert "submitted as answers-" in place(*begin, "--more", "3").stdout
    pods = [job["spec"]["tasks"][0]["replicas"] for job in server.jobs.values()]
    assert pods == [2, 3]


def test_a_rung_is_submitted_when_the_one_before_is_over(
    place: Hpcml, server: VolcanoServer
) -> None:
    place.write(
        "halved.yaml",
        "name: halved\nkind: command\ncommand: {run: [echo]}\nsweep:\n  grid: {n: [0, 1, 2, 3]}\n"
        "  halving: {metric: loss, factor: 2, rungs: 2, steps: 10}\n",
    )
    sweep = ("sweep", "halved.yaml", "--site", "site.yaml")
    said = place(*sweep)
    assert "a rung begins when the one before is over" in said.stderr
    (first,) = server.jobs
    # While it is queued, nothing is added.
    assert "0 left to run" in place(*sweep).stderr
    (run,) = (place.folder / "runs" / "halved").iterdir()
    ids = [json.loads(line)["id"] for line in (run / "cells.jsonl").open()]
    for loss, cell in enumerate(reversed(ids)):
        (run / "cells" / cell / "rungs").mkdir(parents=True)
        result = {"metrics": {"loss": loss}}
        (run / "cells" / cell / "rungs" / "1.json").write_text(json.dumps(result))
    server.phase(first, "Completed", succeeded=4)
    place(*sweep)
    assert json.loads((run / "rungs" / "2.json").read_text())["cells"] == [3, 2]
    (second,) = set(server.jobs) - {first}
    assert server.jobs[second]["spec"]["tasks"][0]["replicas"] == 2
    record = json.loads((run / "submissions" / "002.json").read_text())
    assert (record["rung"], record["cells"]) == (2, [[0, 1]])
