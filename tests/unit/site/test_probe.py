"""The probe of a partition: what its sides do when they meet, and what is made of it."""

from __future__ import annotations

import fcntl
import shutil
import subprocess
import sys
from collections.abc import Generator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcml.render.probe import render_probe
from hpcml.site.check import Check
from hpcml.site.probe import Seen, checks
from hpcml.site.schema import Site
from hpcml.worker import probe

SITE = Site(name="here", scheduler="slurm")

REPORT: dict[str, Any] = {
    "host": "n1",
    "python": "3.11.7",
    "gpus": {"CUDA_VISIBLE_DEVICES": "0"},
    "devices": None,
    "answer": 0.1,
    "clock": 0.01,
    "uncertain": 0.05,
    "runtime": [True, "apptainer version 1.4.5"],
}
MEETING = {"lock": None, "rename": 0.0}
GOOD = Seen(
    gpus=True,
    runtime="apptainer",
    job=7,
    nodes=2,
    python="3.11.7",
    python_good=True,
    reports=[
        {**REPORT, "nodes": {"meeting": {"append": True}}},
        {
            **REPORT,
            "host": "n2",
            "clock": -0.02,
            "nodes": {"meeting": MEETING, "network": {"seconds": 0.001}},
        },
    ],
    login=MEETING,
    script_signalled=True,
    signalled=2,
    back=9.0,
)


def step_together(*sides: Generator[None, None, dict[str, Any]]) -> list[dict[str, Any]]:
    results: dict[int, dict[str, Any]] = {}
    for _ in range(100):
        for number, side in enumerate(sides):
            if number not in results:
                try:
                    next(side)
                except StopIteration as end:
                    results[number] = end.value
    return [results[number] for number in range(len(sides))]


def by_name(found: list[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def test_two_sides_meet(tmp_path: Path) -> None:
    one, other = step_together(probe.first(str(tmp_path)), probe.second(str(tmp_path)))
    assert one == {"append": True}
    assert other["lock"] is None
    assert other["rename"] < 1


def test_locks_that_do_not_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda descriptor, operation: None)
    _, other = step_together(probe.first(str(tmp_path)), probe.second(str(tmp_path)))
    assert other["lock"] == "two have a lock at once"


def test_locks_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", flock)
    _, other = step_together(probe.first(str(tmp_path)), probe.second(str(tmp_path)))
    assert "not implemented" in other["lock"]


def test_a_side_that_is_alone_gives_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter(range(0, 10**6, 60))
    monkeypatch.setattr(probe.time, "monotonic", lambda: next(moments))
    with pytest.raises(probe.NotSeen, match="held"):
        for _ in probe.second(str(tmp_path)):
            pass


def test_all_is_good() -> None:
    found = checks(GOOD, SITE)
    assert [check.name for check in found if check.good is not True] == []
    assert "0.03 s between nodes" in by_name(found)["clocks"].seen


def changed(rank: int, **keys: Any) -> Seen:
    reports = list(GOOD.reports)
    reports[rank] = {**reports[rank], **keys}
    return replace(GOOD, reports=reports)


NODES = GOOD.reports[1]["nodes"]


@pytest.mark.parametrize(
    ("seen", "name", "said"),
    [
        (replace(GOOD, refused="no such account"), "submit", "no such account"),
        (replace(GOOD, not_started="is held"), "start", "--wait"),
        (replace(GOOD, invisible="its job ended"), "runs root", "set runs"),
        (replace(GOOD, python="3.6.8", python_good=False), "python", "3.6.8"),
        (replace(GOOD, reports=[], printed="srun: error"), "report", "srun: error"),
        (replace(GOOD, reports=GOOD.reports[:1]), "nodes", "one of two"),
        (replace(GOOD, login={"lock": "two", "rename": 0.0}), "flock", "-o flock"),
        (replace(GOOD, login=None, login_error="not within 120 s"), "login and node", "120 s"),
        (
            changed(1, nodes={**NODES, "network": {"error": "n1, port 5: refused"}}),
            "network",
            "refused",
        ),
        (changed(0, clock=90.0), "clocks", "NTP"),
        (changed(1, clock=4.0), "clocks", None),
        (changed(1, clock=90.0, uncertain=100.0), "clocks", None),
        (changed(0, gpus={}, devices=["GPU 0: H100"]), "GPUs", "nvidia-smi sees 1"),
        (changed(1, runtime=[False, "not found"]), "containers", "n2"),
        (replace(GOOD, signalled=1), "signal", "1 of 2"),
        (replace(GOOD, signalled=0, script_signalled=False), "signal", "batch script"),
        (replace(GOOD, back=None, requeue_error="Access denied"), "requeue", "chain"),
    ],
)
def test_what_is_wrong_is_said_with_what_to_change(seen: Seen, name: str, said: str | None) -> None:
    check = by_name(checks(seen, SITE))[name]
    assert check.good is (said is None)
    assert (said or "") in check.seen


def test_what_cannot_be_tried_is_skipped() -> None:
    seen = replace(
        GOOD, gpus=False, runtime="", nodes=1, reports=GOOD.reports[:1], alone="x", signalled=1
    )
    site = SITE.model_validate(
        {"name": "here", "scheduler": "slurm", "slurm": {"coming_back": "chain"}}
    )
    skipped = [check.name for check in checks(seen, site) if check.good is None]
    assert skipped == ["two nodes", "GPUs", "containers", "requeue"]


@pytest.mark.parametrize("coming_back", ["requeue", "chain"])
@pytest.mark.parametrize("nodes", [1, 2])
def test_the_script_is_right_in_odd_folders(tmp_path: Path, coming_back: str, nodes: int) -> None:
    folder = tmp_path / "it's $(touch x) a;b 100%"
    site = SITE.model_validate(
        {"name": "here", "scheduler": "slurm", "slurm": {"coming_back": coming_back}}
    )
    directives = (("job-name", "probe"), ("requeue", None))
    text = render_probe(site, directives, nodes, folder, "/opt/a b/python", "apptainer")
    script = tmp_path / "script.sh"
    script.write_text(text)
    subprocess.run(["bash", "-n", script], check=True)
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or "shellcheck"
    command = [shellcheck, "--exclude=SC2016", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert "100%%" in text.split("set -u")[0]
    assert ("srun" in text) == (nodes == 2)
    assert ("scontrol requeue" in text) == (coming_back == "requeue")
