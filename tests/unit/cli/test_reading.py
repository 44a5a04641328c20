"""The commands that look at a run: status, results, logs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from hpcml.errors import UserError
from tests.unit.cli.conftest import Invoke
from tests.unit.runs.fakes import FakeRun, make_cells


class TestStatus:
    def test_every_cell_of_a_small_run(self, fake: FakeRun, invoke: Invoke) -> None:
        out = invoke("status").output
        assert str(fake.folder.path) in out
        assert "5 cells: 1 pending, 1 stopped, 1 failed, 2 done" in out
        (stopped,) = re.findall(r"^ +3 .*$", out, re.MULTILINE)
        assert stopped.split() == ["3", "0.004", "0", "stopped", "40/100", "4.210", "12,346"]
        # Nothing in a reason is an instruction for the terminal.
        assert "cell 2 failed: exit code 1: [bold]boom[/bold]" in out
        assert "pending" in out

    def test_json(self, fake: FakeRun, invoke: Invoke) -> None:
        fake.metrics(3, {"loss": float("nan")})
        document = json.loads(invoke("status", "toy", "--json").output)
        assert document["run"] == str(fake.folder.path)
        assert document["states"] == {"pending": 1, "stopped": 1, "failed": 1, "done": 2}
        assert [cell["index"] for cell in document["cells"]] == [0, 1, 2, 3, 4]
        assert document["cells"][3]["metrics"] == {"loss": None}
        assert document["cells"][4]["state"] == "pending"
        assert set(document["cells"][0]) >= {"id", "state", "attempts", "params", "reason"}

    def test_a_large_run_shows_what_needs_attention(self, root: Path, invoke: Invoke) -> None:
        run = FakeRun(root, make_cells(60))
        run.failed(7)
        run.done(8)
        run.start(9)
        with run.alive(9):
            out = invoke("status").output
        assert "60 cells: 1 running, 57 pending, 1 failed, 1 done" in out
        assert re.findall(r"^ +(\d+) ", out, re.MULTILINE) == ["7", "9"]
        assert "The other 58 cells: hpcml status toy/abc123 --all" in out
        assert len(re.findall(r"^ +(\d+) ", invoke("status", "--all").output, re.M)) == 60

    def test_another_root(self, fake: FakeRun, invoke: Invoke, tmp_path: Path) -> None:
        elsewhere = FakeRun(tmp_path / "elsewhere", make_cells(1), name="other")
        out = invoke("status", "--root", tmp_path / "elsewhere").output
        assert str(elsewhere.folder.path) in out

    def test_an_unknown_run(self, fake: FakeRun, invoke: Invoke) -> None:
        with pytest.raises(UserError, match="toy/abc123"):
            invoke("status", "tyo")


class TestResults:
    def test_the_summary(self, fake: FakeRun, invoke: Invoke) -> None:
        best = fake.checkpoint(1, 10, pointer="final")
        out = invoke("results").output
        assert re.search(r"^ +1 +1 +0\.002 +1 +1\.000 +done *$", out, re.MULTILINE)
        assert "Best so far: cell 1, lowest loss: 1.000" in out
        assert f"checkpoint     {best}" in out
        assert "hpcml logs toy/abc123 2" in out
        assert "continues the 2 unfinished" in out
        assert "hpcml export toy/abc123 best DIR" in out
        assert pq.read_table(fake.folder.results_file).num_rows == 4

    def test_a_run_of_someone_else_can_be_looked_at(
        self, fake: FakeRun, invoke: Invoke, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def read_only(*_: object) -> None:
            raise UserError("cannot write")

        monkeypatch.setattr("hpcml.runs.tables.write_parquet", read_only)
        assert "Best so far" in invoke("results").output

    def test_only_the_best_of_many(self, root: Path, invoke: Invoke) -> None:
        run = FakeRun(root, make_cells(30), objective={"metric": "loss", "mode": "max"})
        for index in range(30):
            run.done(index, loss=index)
        out = invoke("results").output
        assert "and 10 more: hpcml results toy/abc123 --all" in out
        assert "Best: cell 29, highest loss: 29" in out
        assert "Next" not in out
        assert "more" not in invoke("results", "--all").output

    def test_nothing_to_show_yet(self, root: Path, invoke: Invoke) -> None:
        FakeRun(root, make_cells(3))
        out = invoke("results").output
        assert "3 cells: 3 pending" in out
        assert "rank" not in out

    def test_other_forms(self, fake: FakeRun, invoke: Invoke, tmp_path: Path) -> None:
        assert json.loads(invoke("results", "--json").output)["cells"][0]["rank"] == 1
        assert invoke("results", "--csv").output.startswith("rank,cell,index,state,learning_rate")
        invoke("results", "--parquet", tmp_path / "t.parquet")
        assert pq.read_table(tmp_path / "t.parquet")["rank"].to_pylist()[:2] == [1, 2]
        with pytest.raises(UserError, match="exclude each other"):
            invoke("results", "--json", "--csv")

    def test_several_runs_are_compared(
        self, root: Path, fake: FakeRun, invoke: Invoke, tmp_path: Path
    ) -> None:
        objective = {"metric": "loss", "mode": "min"}
        other = FakeRun(root, make_cells(30), name="other", objective=objective)
        for index in range(30):
            other.done(index, loss=index + 0.5)
        out = invoke("results", "toy", "other").output
        assert re.search(r"^ +1 +other +0 +0\.001 +0 +0\.5000 +done *$", out, re.MULTILINE)
        assert re.search(r"^ +2 +toy +1 +0\.002 +1 +1\.000 +done *$", out, re.MULTILINE)
        assert "Best so far: cell 0 of other, lowest loss: 0.5000" in out
        assert f"toy, {fake.folder.path}\n5 cells: 1 pending" in out
        assert f"other, {other.folder.path}\n30 cells: 30 done" in out
        assert "and 14 more" in out
        assert "more" not in invoke("results", "toy", "other", "--all").output
        assert len(json.loads(invoke("results", "toy", "other", "--json").output)["cells"]) == 34
        assert invoke("results", "toy", "other", "--csv").output.startswith("rank,run,cell")
        invoke("results", "toy", "other", "--parquet", tmp_path / "t.parquet")
        assert pq.read_table(tmp_path / "t.parquet").num_rows == 34
        # Two names of one run are one, and that has no column for its run.
        assert invoke("results", "toy", "toy/abc123", "--csv").output.startswith("rank,cell")


class TestWatch:
    def test_status_watch_is_the_same(self, fake: FakeRun, invoke: Invoke) -> None:
        # Nothing of it runs or waits, so it ends at once; each line begins with the time.
        said = [
            re.sub(r"^\[.*?\] ", "", invoke(*words).output)
            for words in (["watch"], ["status", "--watch"])
        ]
        assert said[0] == said[1]
        assert "Best so far: cell 1" in said[0]
        for other in ("--all", "--json"):
            with pytest.raises(UserError, match="hpcml watch"):
                invoke("status", "--watch", other)


class TestLogs:
    @pytest.fixture(autouse=True)
    def _written(self, fake: FakeRun) -> None:
        for name, text in {
            "log.1.out": b"first\n",
            "log.2.out": b"second\n\xff unended",
            "log.2.err": b"a\nb\n",
            "log.2.1.out": b"rank 1\n",
        }.items():
            (fake.dir(1) / name).write_bytes(text)

    def test_the_newest_attempt(self, invoke: Invoke) -> None:
        expected = b"second\n\xff unended\nerr | a\nerr | b\n"
        for name in ("1", "c00001", "best"):
            assert invoke("logs", "toy", name).stdout_bytes == expected

    def test_a_chosen_attempt(self, invoke: Invoke) -> None:
        assert invoke("logs", "toy", "1", "--attempt", 1).stdout_bytes == b"first\n"
        with pytest.raises(UserError, match="no attempt 3; it has 1, 2"):
            invoke("logs", "toy", "1", "--attempt", 3)
        with pytest.raises(UserError, match="leave out --attempt"):
            invoke("logs", "toy", "1", "--attempt", 1, "-f")

    def test_standard_error_alone(self, invoke: Invoke) -> None:
        assert invoke("logs", "toy", "1", "--err").stdout_bytes == b"a\nb\n"

    def test_a_cell_without_logs(self, fake: FakeRun, invoke: Invoke) -> None:
        with pytest.raises(UserError, match=f"it is pending.*{fake.folder.tasks}"):
            invoke("logs", "toy", "4")

    def test_following_a_cell_that_is_done(self, invoke: Invoke) -> None:
        result = invoke("logs", "toy", "1", "-f")
        assert result.stdout_bytes == b"second\n\xff unended\nerr | a\nerr | b\n"
        assert "[done]" in result.stderr
