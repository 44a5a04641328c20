"""What a run looks like in the terminal."""

from __future__ import annotations

import io
import os
import re
import signal
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.cells import cell_len
from rich.console import Console

from hpcml.cli import dashboard, tables, text, view
from hpcml.cli.dashboard import Dashboard, Picture
from hpcml.cli.tables import cells_table, reasons_of, results_table
from hpcml.cli.view import LineView, progress
from hpcml.runs.folder import RunFolder
from hpcml.runs.results import Result, Results, results
from hpcml.runs.status import STATES, CellState, Status, Watcher
from tests.unit.runs.fakes import FakeRun, make_cells


def screen(width: int = 80, height: int = 24) -> Console:
    return Console(
        file=io.StringIO(), width=width, height=height, force_terminal=True, color_system=None
    )


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def lines(root: Path, monkeypatch: pytest.MonkeyPatch) -> Console:
    monkeypatch.setattr(time, "strftime", lambda _: "12:03:04")
    return Console(file=io.StringIO(), width=40, highlight=False, markup=False)


class TestLines:
    def test_a_line_for_each_change(self, root: Path, lines: Console) -> None:
        fake = FakeRun(root, make_cells(2))
        watcher, shown = Watcher(fake.folder), LineView(fake.folder, lines)
        shown.refresh(watcher.refresh())
        fake.start(0)
        with fake.alive(0):
            fake.metrics(0, {"step": 40, "total_steps": 200, "loss": 4.21})
            shown.refresh(watcher.refresh())
            shown.refresh(watcher.refresh())
        fake.end(0, "application", reason="exit code 1: [boom]")
        shown.refresh(watcher.refresh())
        shown.say("a word")
        assert re.sub(", [^,]* left", "", printed(lines)).splitlines() == [
            "[12:03:04] 2 cells: 2 pending",
            "[12:03:04] cell 0 (learning_rate=0.001, seed=0): running, step 40/200, loss 4.210",
            "[12:03:04] cell 0 (learning_rate=0.001, seed=0): failed, step 40/200, loss 4.210: "
            "exit code 1: [boom]",
            "[12:03:04] a word",
        ]

    def test_progress_now_and_then(
        self, root: Path, lines: Console, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fake = FakeRun(root, make_cells(1))
        watcher, shown = Watcher(fake.folder), LineView(fake.folder, lines)
        fake.start(0)
        with fake.alive(0):
            for second in range(31):
                monkeypatch.setattr(time, "monotonic", lambda second=second: 1000.0 + second)
                fake.metrics(0, {"step": second})
                shown.refresh(watcher.refresh())
        steps = re.findall(r"step (\d+)", printed(lines))
        assert steps == ["0", "10", "20", "30"]

    def test_what_happened_before_is_told_in_one_line(self, root: Path, lines: Console) -> None:
        fake = FakeRun(root, make_cells(30))
        for index in range(20):
            fake.done(index)
        LineView(fake.folder, lines).refresh(Watcher(fake.folder).refresh())
        assert printed(lines) == "[12:03:04] 30 cells: 10 pending, 20 done\n"

    def test_many_running_cells_share_a_line(self, root: Path, lines: Console) -> None:
        fake = FakeRun(root, make_cells(30))
        watcher, shown = Watcher(fake.folder), LineView(fake.folder, lines)
        with ExitStack() as living:
            for index in range(30):
                fake.start(index)
                living.enter_context(fake.alive(index))
            shown.refresh(watcher.refresh())
            for index in range(30):
                fake.metrics(index, {"step": 1})
            shown._spoken.clear()
            shown.refresh(watcher.refresh())
        assert len(printed(lines).splitlines()) == 1 + 30 + 1

    def test_no_terminal_gets_lines(self, root: Path, capsys: pytest.CaptureFixture[str]) -> None:
        fake = FakeRun(root, make_cells(1))
        with progress(fake.folder) as shown:
            assert isinstance(shown, LineView)
            shown.refresh(Watcher(fake.folder).refresh())
        assert capsys.readouterr().out.endswith("1 cell: 1 pending\n")


class TestDashboard:
    def frame(self, fake: FakeRun, width: int, height: int) -> list[str]:
        console = screen(width, height)
        console.print(dashboard._Frame(Picture(fake.folder), Watcher(fake.folder).refresh()))
        return printed(console).splitlines()

    def test_what_it_shows(self, root: Path) -> None:
        fake = FakeRun(root, make_cells(6), objective={"metric": "loss", "mode": "min"})
        fake.done(1, loss=2.0)
        fake.done(2, loss=1.0)
        fake.failed(4, "exit code 1: [boom]")
        fake.start(3, attempt=1)
        fake.end(3, "stopped", 10, reason="asked to stop (USR1), saved at step 4")
        fake.start(3, 20, attempt=2)
        fake.metrics(3, *({"step": n, "total_steps": 20, "loss": 9.0 - n} for n in range(9)))
        with fake.alive(3):
            frame = self.frame(fake, 100, 30)
        text = "\n".join(frame)
        assert frame[0].startswith("toy  abc123  local  watched for ")
        assert re.fullmatch("█{32,35}▓{16,19}x{16}░{32,35}", frame[1])
        assert frame[2].startswith("6 cells: 1 running, 2 pending, 1 failed, 2 done")
        assert re.search(r"3 +0\.004 +0 +running +8/20 +1\.000 +█.*▁", text)
        ranked = frame[frame.index("best so far, lowest loss") + 2 :]
        assert [line.split()[:2] for line in ranked[:2]] == [["1", "2"], ["2", "3"]]
        assert "cell 4 (learning_rate=0.005, seed=1) failed: exit code 1: [boom]" in text
        # Where all has no room, the parameters give way.
        back = "cell 3 came back: attempt 2, after: asked to stop (USR1), saved at step 4"
        assert back in text

    def test_coming_back_is_told_with_its_cause_and_stays(self, root: Path) -> None:
        fake = FakeRun(root, make_cells(4))
        for index, cause in enumerate(["application", "rung", "lost"]):
            fake.start(index)
            if cause != "lost":
                fake.end(index, cause, reason="exit code 1: boom")
            fake.start(index, 20, attempt=2, rung=2)
            fake.end(index, "done", 30, attempt=2)
        text = "\n".join(self.frame(fake, 120, 30))
        assert (
            "cell 0 (learning_rate=0.001, seed=0) came back: attempt 2, after: exit code 1" in text
        )
        assert "cell 1" not in text
        assert "cell 2 (learning_rate=0.003, seed=2) came back: attempt 2, after: it ended" in text

    def test_no_two_columns_have_one_name(self, root: Path) -> None:
        objective = {"metric": "loss", "mode": "min"}
        fake = FakeRun(root, make_cells(2), objective=objective)
        fake.done(0, loss=1.0, learning_rate=0.5)
        fake.start(1)
        fake.metrics(1, {"step": 1, "loss": 2.0, "learning_rate": 0.5})
        with fake.alive(1):
            frame = self.frame(fake, 120, 30)
        for first in ("cell", "rank"):
            (titles,) = (line.split() for line in frame if line.startswith(f"{first} "))
            assert "metric.learning_rate" in titles
            assert len(set(titles)) == len(titles)

    def test_the_time_left_is_seen_on_a_narrow_terminal(self, root: Path) -> None:
        fake = FakeRun(root, make_cells(6))
        for index in range(3):
            fake.done(index)
        fake.start(3)
        with fake.alive(3):
            frame = self.frame(fake, 40, 20)
        assert frame[2:4] == ["6 cells: 1 running, 2 pending, 3 done", "about 30s left"]

    def test_a_signal_in_the_middle_of_a_drawing_asks_for_another_one(self, root: Path) -> None:
        fake = FakeRun(root, make_cells(1))
        drawn = []

        class Live:
            def update(self, frame: object, *, refresh: bool) -> None:
                drawn.append(frame)
                if len(drawn) == 1:
                    board.draw()
                    assert len(drawn) == 1

        board = Dashboard(fake.folder, Live())  # type: ignore[arg-type]
        board.draw()
        assert drawn == []
        board.refresh(Watcher(fake.folder).refresh())
        assert len(drawn) == 2

    def test_why_cells_wait_is_told_once(self, root: Path) -> None:
        fake = FakeRun(root, make_cells(3))
        cells = {
            index: CellState(f"c{index:05x}", index, "pending", reason="the queue is full")
            for index in range(3)
        }
        console = screen(60, 20)
        console.print(dashboard._Frame(Picture(fake.folder), Status(3, cells)))
        assert "3 cells: the queue is full" in printed(console).splitlines()

    @pytest.mark.parametrize("height", [5, 8, 12, 24, 100])
    @pytest.mark.parametrize("width", [8, 20, 40, 80, 200])
    def test_it_fits_the_terminal(self, root: Path, width: int, height: int) -> None:
        fake = FakeRun(
            root,
            make_cells(40, text=["ü long text " * 9] * 39 + ["日本語" * 30]),
            objective={"metric": "loss", "mode": "min"},
        )
        for index in range(20):
            fake.done(index, seconds=index, loss=1.0)
        for index in range(20, 30):
            fake.failed(index, "boom " * 50)
        fake.start(30)
        with fake.alive(30):
            frame = self.frame(fake, width, height)
        assert len(frame) < height
        assert all(cell_len(line) <= width for line in frame)
        assert any(line.startswith("running"[:width]) for line in frame) or height < 12

    def test_it_is_used_on_a_terminal(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        fake = FakeRun(root, make_cells(2))
        console = screen()
        monkeypatch.setattr(view, "console", lambda: console)
        monkeypatch.setenv("TERM", "xterm")
        handled = signal.SIGTERM, signal.SIGWINCH
        before_all = [signal.getsignal(each) for each in handled]
        with progress(fake.folder) as shown:
            assert isinstance(shown, Dashboard)
            shown.refresh(Watcher(fake.folder).refresh())
            shown.say("stopping")
            before = printed(console)
            os.kill(os.getpid(), signal.SIGWINCH)
            assert printed(console) != before, "it is drawn anew when the terminal changes"
            with pytest.raises(SystemExit, match="143"):
                os.kill(os.getpid(), signal.SIGTERM)
        assert [signal.getsignal(each) for each in handled] == before_all
        assert "2 cells: 2 pending" in printed(console)
        # It stays on the first screen, too.
        assert printed(console).rstrip().endswith("stopping")

    def test_the_workers_of_an_inference_have_one_curve(self, root: Path) -> None:
        fake = FakeRun(root, make_cells(1), kind="infer")
        for worker in range(2):
            folder = fake.dir(0) / "workers" / str(worker)
            folder.mkdir(parents=True)
            (folder / "metrics.jsonl").write_text(
                "".join(
                    f'{{"tokens_per_second": {speed}, "reported_at": {speed}}}\n'
                    for speed in range(1, 9)
                )
            )
        cell = CellState(fake.cells[0]["id"], 0, "running")
        assert Picture(fake.folder)._curve(cell, plain=False) == "▁▁▂▃▃▄▅▅▆▇▇█"

    def test_an_inference_is_counted_in_rows(self, root: Path) -> None:
        fake = FakeRun(root, make_cells(1), kind="infer")
        cell = CellState(
            fake.cells[0]["id"],
            0,
            "running",
            step=750,
            total_steps=3000,
            tokens_per_second=1234.5,
            metrics={"rows": 1, "left": 2},
        )

        def frame(*cells: CellState) -> list[str]:
            console = screen(80, 20)
            states = {cell.index: cell for cell in cells}
            console.print(dashboard._Frame(Picture(fake.folder), Status(len(cells), states)))
            return printed(console).splitlines()

        shown = frame(cell)
        assert shown[1:3] == ["█" * 20 + "░" * 60, "1 cell: 1 running; 750 of 3,000 rows"]
        titles = ["cell", "state", "rows", "metric.left", "metric.rows", "tokens/s"]
        assert shown[5].split() == titles
        # Where an input is not counted yet, or something failed, cells say more.
        other = CellState("x", 1, "failed")
        assert frame(cell, other)[1] == "▓" * 40 + "x" * 40
        assert "750 rows" in frame(cell, other)[2]


@example([8.9e307, 1.7e308], 1, False)
@example([-1.7e308, 1.7e308], 2, False)
@example([0.0, 5e-324], 2, False)
@given(
    st.lists(st.floats() | st.integers(-(10**9), 10**9), max_size=50),
    st.integers(1, 20),
    st.booleans(),
)
def test_any_values_have_a_curve(values: list[float], width: int, plain: bool) -> None:
    curve = dashboard.sparkline(values, width, plain=plain)
    assert len(curve) <= width
    assert curve.isascii() or not plain


def test_a_curve() -> None:
    assert dashboard.sparkline([8, 7, 6, 5, 4, 3, 2, 1], 8) == "█▇▆▅▄▃▂▁"
    assert dashboard.sparkline([1, 1, 5, 5, float("nan")], 2) == "▁█"
    assert dashboard.sparkline([3, 3, 3], 9) == "▁▁▁"
    assert dashboard.sparkline([3], 9) == ""


@given(
    st.dictionaries(st.sampled_from(STATES), st.integers(1, 10**5), min_size=1), st.integers(7, 200)
)
def test_the_bar_has_every_state_and_fills_the_line(counts: dict[str, int], width: int) -> None:
    bar = dashboard._bar(counts, sum(counts.values()), width, plain=True).plain
    assert len(bar) == width
    assert len(set(bar)) == len(counts)


@given(
    states=st.lists(
        st.builds(
            CellState,
            id=st.just("x"),
            index=st.integers(0, 10**6),
            state=st.sampled_from(STATES),
            params=st.dictionaries(
                st.sampled_from(["a", "b", "long_name"]),
                st.one_of(st.text(), st.integers(), st.floats(), st.none(), st.lists(st.text())),
            ),
            attempts=st.integers(0, 1000),
            metrics=st.dictionaries(
                st.sampled_from(["loss", "eval_loss", "x"]), st.floats() | st.integers()
            ),
            step=st.none() | st.integers(),
            total_steps=st.none() | st.integers(),
            tokens_per_second=st.none() | st.floats(),
            eta_seconds=st.none() | st.floats(0, 1e9),
            reason=st.none() | st.text(),
        ),
        min_size=1,
        max_size=4,
    ),
    width=st.integers(1, 200),
)
def test_any_cell_can_be_shown(states: list[CellState], width: int) -> None:
    run = RunFolder(Path("/nowhere"))
    run.__dict__["plan"] = {"swept": ["a", "b", "long_name"], "objective": None}
    rows = [Result(None, cell, None) for cell in states]
    found = Results(run, rows, 0, {}, {"loss": "loss", "x": "x"})
    for table in (
        cells_table(states, run, width),
        results_table(found, rows, width),
    ):
        console = screen(width)
        console.print(table)
        # Nothing reaches the terminal that it would obey.
        assert all(char == "\n" or char.isprintable() for char in printed(console))
        assert len(printed(console).split("\n")) == len(states) + 2
    assert all(sentence.isprintable() for sentence in reasons_of(states))


def test_equal_reasons_are_told_once() -> None:
    cells = [CellState("x", i, "failed", reason="boom\n at x") for i in range(10)]
    cells.append(CellState("y", 10, "lost", reason="gone"))
    assert reasons_of(cells) == [
        "cells 0, 1, 2, 3, 4, 5, 6, 7 and 2 more failed: boom at x",
        "cell 10 lost: gone",
    ]
    many = [CellState("x", i, "failed", reason=f"reason {i}") for i in range(15)]
    assert reasons_of(many)[-1] == "and 5 other reasons (--json has all)"


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, ""),
        (-3, "0s"),
        (0.4, "0s"),
        (59.6, "1m 00s"),
        (185, "3m 05s"),
        (7800, "2h 10m"),
        (273600, "3d 04h"),
    ],
)
def test_durations(seconds: float | None, words: str) -> None:
    assert text.duration(seconds) == words


@pytest.mark.parametrize(
    ("item", "words"),
    [
        (None, ""),
        (3, "3"),
        (0.0, "0"),
        (1.0, "1.000"),
        (4.21, "4.210"),
        (999.96, "1000."),
        (12345.6, "12346"),
        (1.5e-5, "1.500e-05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
    ],
)
def test_numbers(item: float | None, words: str) -> None:
    assert text.number(item) == words


def test_a_value_is_never_an_instruction_for_the_terminal() -> None:
    assert text.value("\x1b[31mred") == '"\\u001b[31mred"'
    assert text.value("two words") == "two words"
    assert text.value("line\nline") == '"line\\nline"'
    assert text.value(1e-4) == "0.0001"
    assert text.value([1, "a"]) == '[1, "a"]'


def test_the_middle_of_a_long_text_is_left_out() -> None:
    assert text.short("abcdefghij", 10) == "abcdefghij"
    assert text.short("abcdefghijklmn", 9) == "abcdef … lmn"
    assert len(text.value("x" * 10_000)) < 110
    assert len(text.value(["x" * 10_000])) < 110
    assert len(text.one_line("x" * 10_000)) < 1010
    assert len(text.message("x" * 10_000 + "\nnext")) < 1010 + 5


@given(st.text())
def test_a_message_is_never_an_instruction_for_the_terminal(words: str) -> None:
    assert all(line.isprintable() for line in text.message(words).split("\n"))
    assert text.one_line(words).isprintable()
    assert text.message("ü: \x1b[31mred\nnext") == "ü: \\x1b[31mred\nnext"


def test_odd_metrics_and_reasons_in_lines(root: Path, lines: Console) -> None:
    fake = FakeRun(root, make_cells(2, text=["x" * 10_000, "y"]))
    watcher, shown = Watcher(fake.folder), LineView(fake.folder, lines)
    shown.refresh(watcher.refresh())
    fake.failed(0, "\x1b[31m" + "z" * 10_000, **{"\x1b[32m": 1.0})
    shown.refresh(watcher.refresh())
    said = printed(lines)
    assert all(line.isprintable() for line in said.splitlines())
    assert len(said) < 2000
    table = screen(200)
    table.print(cells_table(list(watcher.refresh().cells.values()), fake.folder, 200))
    assert all(line.isprintable() for line in printed(table).splitlines())


def test_a_metric_called_like_a_parameter_has_another_title(root: Path) -> None:
    fake = FakeRun(root, make_cells(2), objective={"metric": "loss", "mode": "min"})
    fake.done(0, loss=1.0, learning_rate=0.5)
    status = Watcher(fake.folder).refresh()
    found = results(fake.folder, status)
    for table in (
        results_table(found, found.rows, 100),
        cells_table(list(status.cells.values()), fake.folder, 100),
    ):
        titles = [str(column.header) for column in table.columns]
        assert len(titles) == len(set(titles))
        assert {"learning_rate", "metric.learning_rate"} <= set(titles)


def test_a_terminal_that_knows_few_characters_gets_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="latin-1"))
    output = tables.console()
    output.print("a … long ü", soft_wrap=True)
    output.file.flush()
    assert written.getvalue() == "a ? long ü\n".encode("latin-1")


def test_a_dumb_terminal_is_as_wide_as_it_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setenv("COLUMNS", "133")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert tables.console().width == 133


@pytest.mark.parametrize(
    ("method", "words"), [("prompt_tuning", "DIR --unmerged"), ("lora", "DIR")]
)
def test_how_to_export(
    root: Path, capsys: pytest.CaptureFixture[str], method: str, words: str
) -> None:
    cells = make_cells(2)
    for cell in cells:
        cell["payload"] = {"parameters": {"fine_tuning_method": method}}
    fake = FakeRun(root, cells, objective={"metric": "loss", "mode": "min"}, kind="train")
    fake.done(0, loss=1.0)
    fake.checkpoint(0, 3)
    status = Watcher(fake.folder).refresh()
    view.print_summary(results(fake.folder, status), status)
    assert f"hpcml export toy/abc123 best {words}\n" in capsys.readouterr().out


def test_the_summary_counts_every_cell() -> None:
    assert text.counts(Status(1, {}).counts(), 1) == "1 cell: 1 pending"
