"""What a report gathers, and how it stands in the page."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hpcml.errors import UserError
from hpcml.report.data import Report, gather
from hpcml.report.markdown import markdown
from hpcml.report.page import page
from hpcml.runs.status import collect
from tests.unit.cli.conftest import Invoke
from tests.unit.runs.fakes import START, FakeRun, at, make_cells

NASTY = "</script><!-- <b>&amp;\u2028 \ud800 ]]>"


@pytest.fixture
def fake(root: Path) -> FakeRun:
    run = FakeRun(root, make_cells(4), objective={"metric": "loss", "mode": "min"})
    run.folder.write_submission({"cells": [[0, 3]], "created": at(-30)})
    return run


def report(run: FakeRun) -> Report:
    return gather(run.folder, collect(run.folder))


def embedded(text: str) -> dict[str, Any]:
    """The data of a page, as a browser finds them."""
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', text, re.S)
    document: dict[str, Any] = json.loads(data)
    return document


class TestTimeline:
    def test_waiting_saving_and_coming_back(self, fake: FakeRun) -> None:
        fake.start(0, 5, submission=1)
        saved = {"time": at(20), "event": "checkpoint", "step": 1, "path": "x", "seconds": 4}
        fake.append(0, "events.jsonl", saved)
        fake.event(0, "signal", 15, attempt=1, signal="USR1")
        fake.end(0, "stopped", 21)
        fake.start(0, 60, attempt=2, submission=1)
        fake.end(0, "done", 70, attempt=2)
        one, two = report(fake).attempts
        assert (one.queued, one.started, one.ended) == (START - 30, START + 5, START + 21)
        assert (one.cause, one.asked, one.saved) == (
            "stopped",
            START + 15,
            [(START + 16, START + 20)],
        )
        assert (two.queued, two.started, two.ended) == (START + 21, START + 60, START + 70)
        assert (two.number, two.cause, two.asked, two.saved) == (2, "done", None, [])

    def test_an_attempt_that_runs_has_no_end(self, fake: FakeRun) -> None:
        fake.start(0, 5)
        with fake.alive(0):
            (attempt,) = report(fake).attempts
        assert (attempt.ended, attempt.cause, attempt.queued) == (None, "", None)

    def test_an_attempt_without_a_word_was_lost(self, fake: FakeRun) -> None:
        fake.start(0, 5)
        fake.start(0, 50, attempt=2)
        with fake.alive(0):
            lost, running = report(fake).attempts
        assert (lost.cause, lost.ended) == ("lost", START + 5)
        assert running.ended is None
        fake.start(1, 7)
        *_, lost = report(fake).attempts
        assert (lost.cell, lost.cause) == (1, "lost")

    def test_the_attempts_of_workers(self, root: Path) -> None:
        run = FakeRun(root, make_cells(1), kind="infer")
        for number in (0, 1):
            folder = run.dir(0) / "workers" / str(number)
            folder.mkdir(parents=True)
            event = {"time": at(number), "event": "started", "attempt": 1, "host": "h", "pid": 1}
            (folder / "events.jsonl").write_text(json.dumps(event) + "\n")
        assert [attempt.worker for attempt in report(run).attempts] == [0, 1]


class TestFailures:
    def test_the_last_lines_of_the_last_attempt(self, fake: FakeRun) -> None:
        fake.failed(1, reason="exit code 3")
        (fake.dir(1) / "log.1.err").write_text("of the first attempt\n")
        (fake.dir(1) / "log.2.out").write_text("fine\n")
        (fake.dir(1) / "log.2.err").write_text("".join(f"line {n}\n" for n in range(99)))
        (failure,) = report(fake).failures
        assert (failure.cell, failure.state, failure.reason) == (1, "failed", "exit code 3")
        assert failure.log == f"cells/{fake.cells[1]['id']}/log.2.err"
        assert failure.lines.splitlines()[0] == "line 79"
        assert failure.lines.splitlines()[-1] == "line 98"

    def test_where_stderr_is_empty_the_output_says_it(self, fake: FakeRun) -> None:
        fake.failed(1)
        (fake.dir(1) / "log.1.out").write_text("no such file\n")
        (fake.dir(1) / "log.1.err").write_text("")
        assert report(fake).failures[0].lines == "no such file\n"

    def test_a_cell_that_wrote_nothing(self, fake: FakeRun) -> None:
        fake.failed(1)
        assert report(fake).failures[0].log == ""


class TestPage:
    def test_nothing_of_a_run_is_markup(self, root: Path) -> None:
        cells = make_cells(2, prompt=[NASTY, "plain"])
        run = FakeRun(root, cells, name="nasty")
        run.failed(0, reason=NASTY)
        (run.dir(0) / "log.1.err").write_bytes(b"\xff</script><script>alert(1)</script>")
        text = page(report(run)).decode()
        assert len(re.findall("</script", text)) == 2
        assert "<!--" not in text
        assert "\u2028" not in text
        data = embedded(text)
        assert data["cells"][0]["params"]["prompt"] == NASTY
        assert data["failures"][0]["lines"] == "\ufffd</script><script>alert(1)</script>"

    def test_it_needs_no_network(self, fake: FakeRun) -> None:
        text = page(report(fake)).decode()
        addresses = set(re.findall(r"https?://[^\"' ]*", text))
        assert addresses <= {"http://www.w3.org/2000/svg"}
        assert "default-src 'none'" in text

    def test_numbers_that_json_cannot_hold(self, root: Path) -> None:
        run = FakeRun(root, make_cells(1, scale=[float("inf")]))
        run.done(0, loss=float("nan"))
        (cell,) = embedded(page(report(run)).decode())["cells"]
        assert (cell["params"]["scale"], cell["metrics"]) == (None, {"loss": None})


class TestCommand:
    def test_it_prints_where_the_page_is(self, fake: FakeRun, invoke: Invoke) -> None:
        fake.done(0, loss=0.5)
        target = fake.folder.path / "report.html"
        assert invoke("report").output == f"{target}\n"
        data = embedded(target.read_text())
        assert data["counts"] == {"pending": 3, "done": 1}
        assert [cell["rank"] for cell in data["cells"]] == [1, None, None, None]
        assert data["recipe"] == "name: toy\n"

    def test_another_file(self, fake: FakeRun, invoke: Invoke, tmp_path: Path) -> None:
        invoke("report", "toy", "-o", tmp_path / "r.html")
        assert embedded((tmp_path / "r.html").read_text())["run_id"] == "abc123"
        assert not (fake.folder.path / "report.html").exists()
        with pytest.raises(UserError, match="cannot write"):
            invoke("report", "toy", "-o", tmp_path / "none" / "r.html")

    def test_markdown(self, fake: FakeRun, invoke: Invoke) -> None:
        fake.done(0, loss=0.75)
        fake.done(1, loss=0.5)
        fake.failed(2, reason="exit code 1:\n| <b>boom</b>")
        out = invoke("report", "--markdown").output
        assert "| done | 2 |" in out
        assert out.index("| 1 | 1 | done | 0.002 | 1 | 0.5 |") < out.index("| 2 | 0 | done |")
        assert "| 1 | 2 | exit code 1: \\| \\<b\\>boom\\</b\\> |" in out
        assert not (fake.folder.path / "report.html").exists()

    @pytest.mark.parametrize("begun", [False, True])
    def test_a_picture(
        self,
        root: Path,
        invoke: Invoke,
        tmp_path: Path,
        begun: bool,
    ) -> None:
        cells = make_cells(3, prompt=["$x$", "$_{", NASTY])
        run = FakeRun(root, cells, objective={"metric": "$loss_", "mode": "min"})
        if begun:
            run.done(0, **{"$loss_": 0.5})
            run.start(1)
        target = tmp_path / "r.png"
        assert invoke("report", "--png", target).output == f"{target}\n"
        assert target.read_bytes().startswith(b"\x89PNG")

    def test_one_form_at_a_time(self, fake: FakeRun, invoke: Invoke) -> None:
        with pytest.raises(UserError, match="exclude each other"):
            invoke("report", "--markdown", "-o", "r.html")


def test_curves_of_very_many_cells_are_of_the_best(root: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("hpcml.report.data._POINTS", 5 * 12)
    run = FakeRun(root, make_cells(9), objective={"metric": "loss", "mode": "min"})
    for index in range(9):
        run.done(index, loss=float(9 - index))
    found = report(run)
    assert found.curved == 5
    assert set(found.curves["loss"]) == {4, 5, 6, 7, 8}


def test_a_metric_called_like_a_parameter_has_another_title(root: Path) -> None:
    run = FakeRun(root, make_cells(2), objective={"metric": "learning_rate", "mode": "min"})
    run.done(0, learning_rate=0.5, time=1.0)
    found = report(run)
    assert found.titles == {
        "params": {"learning_rate": "learning_rate", "seed": "seed"},
        "metrics": {"learning_rate": "metric.learning_rate", "time": "metric.time"},
    }
    assert "| learning\\_rate | seed | metric.learning\\_rate |" in markdown(found)
