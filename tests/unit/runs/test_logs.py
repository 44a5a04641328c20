"""Logs of cells, their ends, and following them."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.runs import logs
from hpcml.runs.cancel import cancel_cell
from hpcml.runs.logs import cell_logs, follow, tail
from hpcml.runs.status import CellState
from tests.unit.runs.fakes import FakeRun, make_cells


@pytest.fixture
def fake(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path, make_cells(1))


def log(fake: FakeRun, text: str, name: str = "log.1.out") -> None:
    with (fake.dir(0) / name).open("a") as file:
        file.write(text)


def test_logs_are_listed_in_order(fake: FakeRun) -> None:
    assert cell_logs(fake.folder.cell_dir("c00000")) == []
    for name in ("log.10.err", "log.2.out", "log.10.out", "log.2.1.out", "log.x", "stop"):
        log(fake, "", name)
    found = [(entry.attempt, entry.rank, entry.stream) for entry in cell_logs(fake.dir(0))]
    assert found == [(2, 0, "out"), (2, 1, "out"), (10, 0, "out"), (10, 0, "err")]


@given(
    content=st.lists(st.sampled_from([b"a", b"bb", b"\n", b"\r\n", b"\xff"]), max_size=40),
    lines=st.integers(1, 5),
    block=st.integers(1, 7),
)
def test_tail(content: list[bytes], lines: int, block: int, tmp_path_factory: object) -> None:
    path = tmp_path_factory.mktemp("tail") / "log"  # type: ignore[attr-defined]
    data = b"".join(content)
    path.write_bytes(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logs, "_BLOCK", block)
        text, start = tail(path, lines)
    assert data[start:] == text
    assert text.splitlines() == data.splitlines()[-lines:]


class Script:
    """What happens at each look of ``follow``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *steps: object) -> None:
        self.steps = list(steps)
        self.time = 0.0
        monkeypatch.setattr(logs.time, "sleep", self.sleep)
        monkeypatch.setattr(logs.time, "monotonic", lambda: self.time)

    def sleep(self, seconds: float) -> None:
        self.time += seconds
        if self.steps:
            self.steps.pop(0)()  # type: ignore[operator]
        assert self.time < 60, "it does not end"


def followed(fake: FakeRun, **options: object) -> list[object]:
    return [
        news.state if isinstance(news, CellState) else (news[0].path.name, news[1])
        for news in follow(fake.folder, "c00000", **options)  # type: ignore[arg-type]
    ]


def test_following_across_attempts(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(
        monkeypatch,
        lambda: (fake.start(0), log(fake, "one\ntw")),
        lambda: log(fake, "o\n"),
        lambda: (log(fake, "unended"), fake.end(0, "stopped")),
        lambda: (fake.start(0, attempt=2), log(fake, "three\n", "log.2.out")),
        lambda: (log(fake, "warning\n", "log.2.err"), fake.end(0, "done", attempt=2)),
    )
    monkeypatch.setattr("hpcml.runs.status.is_alive", lambda *_: True)
    assert followed(fake) == [
        "pending",
        ("log.1.out", b"one\n"),
        "running",
        ("log.1.out", b"two\n"),
        ("log.1.out", b"unended"),
        "stopped",
        ("log.2.out", b"three\n"),
        "running",
        ("log.2.err", b"warning\n"),
        "done",
    ]


def test_a_failed_cell_is_waited_for_as_long_as_a_retry_takes(
    fake: FakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Script(monkeypatch, lambda: fake.start(0, attempt=2), lambda: fake.failed(0))
    monkeypatch.setattr("hpcml.runs.status.is_alive", lambda *_: True)
    fake.failed(0)
    assert followed(fake) == ["failed", "running", "failed"]
    assert script.time >= logs._RETRY_SECONDS


def test_a_cancelled_cell_has_ended(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch)
    cancel_cell(fake.folder, "c00000")
    assert followed(fake) == ["stopped"]


def test_what_was_shown_is_not_shown_again(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    Script(monkeypatch)
    log(fake, "old\n")
    log(fake, "shown\nnew\n", "log.2.out")
    fake.done(0)
    offsets = {fake.dir(0) / "log.2.out": 6}
    assert followed(fake, offsets=offsets) == [("log.2.out", b"new\n"), "done"]


def test_a_long_log_is_shown_whole(fake: FakeRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_BLOCK", 1)
    log(fake, "x" * 100)
    fake.done(0)
    shown = [news[1] for news in followed(fake) if isinstance(news, tuple)]
    assert b"".join(shown) == b"x" * 100


def test_one_stream_alone(fake: FakeRun) -> None:
    log(fake, "out\n")
    log(fake, "err\n", "log.1.err")
    log(fake, "rank 1\n", "log.1.1.err")
    fake.done(0)
    assert followed(fake, streams=("err",)) == [("log.1.err", b"err\n"), "done"]
