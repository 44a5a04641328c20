"""The work on a cell with a stand-in for the engine: exactly once, whatever happens."""

from __future__ import annotations

import os
import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hpcml.infer.engine import Request
from hpcml.infer.job import InferenceError, InferenceJob
from hpcml.infer.runner import AGAIN, DONE, FAILED, Runner

from .jobs import EngineDied, Never, Output, StandIn, hold, make_job, output, proof, write_input


def run(job: InferenceJob, engine: StandIn | None = None, stop: object = Never()) -> int:
    held = hold(job)
    try:
        return Runner(job, stop, lambda: engine or StandIn(), 1.0).run()  # type: ignore[arg-type]
    finally:
        os.close(held)


def check(job: InferenceJob, texts: list[str]) -> None:
    """The output has every row once, in the order of the input, with its answer."""
    assert [(row["key"], row["answer"]) for row in output(job)] == [
        (f"k{number}", text[::-1]) for number, text in enumerate(texts)
    ]
    found = proof(job)
    assert (found["rows_in"], found["rows_out"]) == (len(texts), len(texts))
    assert (found["duplicates"], found["missing"], found["failed"]) == (0, 0, 0)


def test_every_row_is_answered_once(tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(100)]
    write_input(tmp_path, texts)
    job = make_job(tmp_path, shard_rows=7)
    assert run(job) == DONE
    check(job, texts)
    # Once more there is nothing to do.
    assert run(job, StandIn(each=lambda request: pytest.fail("it was answered"))) == DONE


@pytest.mark.parametrize("limit", [1, 7, 8, 1000])
def test_nobody_waits_while_something_is_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    texts = [f"question {number}" for number in range(50)]
    write_input(tmp_path, texts)
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda seconds: pytest.fail("it waits for nobody")
    )
    monkeypatch.setattr("hpcml.infer.runner.time", clock)
    assert run(make_job(tmp_path, shard_rows=7), StandIn(limit)) == DONE


class StopAfter:
    """Asks to leave after some looks."""

    def __init__(self, looks: int) -> None:
        self._left = looks

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0


class Killed(BaseException):
    """As if the process had been killed: nothing is tidied up."""


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    rows=st.integers(0, 60),
    shard_rows=st.integers(1, 20),
    limit=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_kills_and_stops_lose_nothing(
    tmp_path_factory: pytest.TempPathFactory, rows: int, shard_rows: int, limit: int, seed: int
) -> None:
    folder = tmp_path_factory.mktemp("killed")
    chooser = random.Random(seed)
    texts = [
        ("common beginning " * 20 if chooser.random() < 0.5 else "") + str(number)
        for number in range(rows)
    ]
    write_input(folder, texts)
    job = make_job(folder, shard_rows=shard_rows, workers=3)
    answered: dict[int, int] = {}

    def each(request: Request) -> None:
        if chooser.random() < 0.1:
            raise Killed
        answered[request.row] = answered.get(request.row, 0) + 1

    for _ in range(300):
        mine = replace(job, worker=chooser.randrange(3))
        mine.worker_dir.mkdir(parents=True, exist_ok=True)
        (mine.worker_dir / "events.jsonl").touch()
        held = hold(mine)
        runner = Runner(mine, StopAfter(chooser.randrange(30)), lambda: StandIn(limit, each), 1.0)
        runner._leave = lambda: None  # type: ignore[method-assign]
        try:
            if runner.run() == DONE:
                break
        except Killed:
            # A line may have been cut off in the middle.
            for journal in mine.cell_dir.glob("rounds/1/journals/*.jsonl"):
                if chooser.random() < 0.3:
                    with journal.open("ab") as file:
                        file.write(b'{"row": 3, "te')
        finally:
            os.close(held)
    check(job, texts)


def test_workers_side_by_side(tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(400)]
    write_input(tmp_path, texts)
    counts: list[int] = [0] * len(texts)
    codes: list[int] = []

    def each(request: Request) -> None:
        counts[request.row] += 1

    def work(mine: InferenceJob) -> None:
        codes.append(run(mine, StandIn(each=each)))

    jobs = [make_job(tmp_path, shard_rows=9, workers=4, worker=number) for number in range(4)]
    threads = [threading.Thread(target=work, args=(mine,)) for mine in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert codes == [DONE] * 4
    assert counts == [1] * len(texts)
    check(jobs[0], texts)


def test_a_row_that_kills_the_engine_is_set_aside(tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(50)]
    texts[17] = texts[31] = "deadly"
    write_input(tmp_path, texts)
    job = make_job(tmp_path, shard_rows=10, max_failed=0.1)
    deaths = 0

    def each(request: Request) -> None:
        nonlocal deaths
        if request.text == "deadly":
            deaths += 1
            raise EngineDied("signal 11")

    engines: list[StandIn] = []

    def start() -> StandIn:
        engines.append(StandIn(8, each))
        return engines[-1]

    held = hold(job)
    assert Runner(job, Never(), start, 1.0).run() == DONE
    os.close(held)
    rows = output(job)
    failed = [number for number, row in enumerate(rows) if row["cause"] is not None]
    assert failed == [17, 31]
    assert {rows[number]["cause"] for number in failed} == {"engine_died"}
    assert "signal 11" in rows[17]["error"]
    assert proof(job)["errors"] == {"engine_died": 2}
    assert deaths == 4
    assert len(engines) == 5


def test_an_engine_that_never_starts_ends_the_work(tmp_path: Path) -> None:
    write_input(tmp_path, ["a"] * 3)

    class Stillborn(StandIn):
        def poll(self, timeout: float) -> list:  # type: ignore[type-arg]
            raise EngineDied("exit code 1")

    with pytest.raises(InferenceError, match="exit code 1"):
        run(make_job(tmp_path), Stillborn())


def test_a_signal_that_reaches_the_engine_as_well_is_no_failure(tmp_path: Path) -> None:
    """As scancel and preemption send it, to all processes of a job, even one that starts."""
    write_input(tmp_path, ["a"] * 3)

    class Asked:
        requested = False

    class Struck(StandIn):
        def poll(self, timeout: float) -> list:  # type: ignore[type-arg]
            Asked.requested = True
            raise EngineDied("signal 15")

    job = make_job(tmp_path)
    assert run(job, Struck(), Asked()) == AGAIN
    assert run(job) == DONE
    assert proof(job)["errors"] == {}


def test_a_stopped_worker_leaves_its_shards_to_others(tmp_path: Path) -> None:
    write_input(tmp_path, [f"question {number}" for number in range(30)])
    first, second = make_job(tmp_path, shard_rows=10), make_job(tmp_path, shard_rows=10, worker=1)
    # Both live on; the second does not have to wait until the first is dead.
    held = hold(first)
    assert Runner(first, StopAfter(4), lambda: StandIn(2), 1000.0).run() == AGAIN
    assert Runner(second, Never(), lambda: StandIn(2), 1000.0).run() == DONE
    os.close(held)
    assert proof(first)["rows_out"] == 30


def test_changes_are_noticed(tmp_path: Path) -> None:
    write_input(tmp_path, [f"question {number}" for number in range(30)])
    job = make_job(tmp_path, shard_rows=10)
    assert run(job, stop=StopAfter(3)) == AGAIN
    (job.model / "config.json").write_text('{"other": 1}')
    with pytest.raises(InferenceError, match=r"the model changed.*--rerun"):
        run(job)
    (job.model / "config.json").write_text("{}")
    write_input(tmp_path, ["another question"] * 30)
    with pytest.raises(InferenceError, match="the input changed"):
        run(job)
    # The same content again is no change.
    write_input(tmp_path, [f"question {number}" for number in range(30)])
    assert run(job) == DONE


def test_a_new_round_answers_what_is_new(tmp_path: Path) -> None:
    texts = [f"question {number}" for number in range(20)]
    write_input(tmp_path, texts)
    job = make_job(tmp_path, shard_rows=4, output=Output(columns=("text",)))
    assert run(job, StandIn(1), stop=StopAfter(8)) == AGAIN
    half = sum(path.read_bytes().count(b"\n") for path in job.cell_dir.glob("rounds/1/journals/*"))
    assert half  # a shard was left in the middle of it
    texts = ["an earlier one", *texts[:10], "changed", *texts[11:]]
    keys = ["new", *(f"k{number}" for number in range(20))]
    write_input(tmp_path, texts, key2=keys)
    job = make_job(tmp_path, shard_rows=4, input=replace(job.input, key="key2"))
    (job.cell_dir / "rounds" / "2").mkdir()
    (job.cell_dir / "rounds" / "2" / "request.json").write_text('{"accept_changes": true}')
    asked: list[str] = []
    assert run(job, StandIn(each=lambda request: asked.append(request.text))) == DONE
    assert [row["key"] for row in output(job)] == keys
    assert [row["answer"] for row in output(job)] == [text[::-1] for text in texts]


def test_too_many_failures(tmp_path: Path) -> None:
    write_input(tmp_path, ["good", None, "good", ""])
    job = make_job(tmp_path, max_failed=0.5)
    assert run(job) == DONE
    strict = make_job(tmp_path, max_failed=0.4)
    (job.cell_dir / "result.json").unlink()
    assert run(strict) == FAILED
    assert not (job.cell_dir / "result.json").exists()
    assert proof(job)["errors"] == {"missing": 1, "empty": 1}


def test_a_file_of_somebody_else_is_not_overwritten(tmp_path: Path) -> None:
    write_input(tmp_path, ["a"])
    target = tmp_path / "answers.parquet"
    target.write_text("precious")
    with pytest.raises(InferenceError, match="is there already"):
        run(make_job(tmp_path, output=Output(path=target)))
    assert target.read_text() == "precious"
