"""``python -m hpcml.train`` as the worker starts it: signals, kills, several ranks."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcml.train.__main__ import lacks_memory
from tests.integration.train import cells

MakeCell = Callable[..., Path]

# Long enough to be interrupted; each step takes some milliseconds.
LONG = {"max_steps": 1500, "eval_steps": 300, "save_steps": 10, "dropout": 0.1}
SECONDS = 120.0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + SECONDS
    while not condition():
        assert process.poll() is None, "it ended before"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.002)


def count_losses(cell: Path) -> int:
    path = cell / "metrics.jsonl"
    return path.read_bytes().count(b'"loss"') if path.exists() else 0


def steps_reported(cell: Path, at_least: int) -> Callable[[], bool]:
    return lambda: count_losses(cell) >= at_least


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, corpus: str, data_root: Path) -> Path:
    """The long training without any interruption."""
    cell = cells.write_cell(tmp_path_factory.mktemp("whole") / "cell", corpus, LONG)
    assert cells.train(cell, data_root) == 0
    return cell


def test_a_signal_saves_and_the_next_attempt_continues(
    make_cell: MakeCell, data_root: Path, whole: Path
) -> None:
    cell = make_cell(parameters=LONG)
    process = cells.start(cell, data_root)
    wait_for(steps_reported(cell, 2), process)
    process.send_signal(signal.SIGUSR1)
    assert process.wait(SECONDS) == 75
    stopped_at = cells.events(cell, "checkpoint")[-1]["step"]
    assert 8 <= stopped_at < LONG["max_steps"]

    process = cells.start(cell, data_root)
    wait_for(steps_reported(cell, stopped_at // 4 + 2), process)
    (cell / "stop").touch()
    assert process.wait(SECONDS) == 75
    (cell / "stop").unlink()

    assert cells.start(cell, data_root).wait(SECONDS) == 0
    assert cells.metrics(cell) == cells.metrics(whole)
    assert cells.weights(cell) == cells.weights(whole)


def test_a_signal_while_starting_ends_it_at_once(make_cell: MakeCell, data_root: Path) -> None:
    cell = make_cell(parameters=LONG)
    process = cells.start(cell, data_root)
    status = Path(f"/proc/{process.pid}/status")

    def listens() -> bool:
        (caught,) = [line for line in status.read_text().splitlines() if "SigCgt" in line]
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    wait_for(listens, process)
    time.sleep(1.0)  # in the middle of the imports
    process.send_signal(signal.SIGTERM)
    sent = time.monotonic()
    assert process.wait(SECONDS) == 75
    assert time.monotonic() - sent < 1.0
    assert "before the first step" in (cell / "log.0").read_text()
    assert not (cell / "metrics.jsonl").exists()


@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_any_moment_cost_nothing_but_time(
    make_cell: MakeCell, data_root: Path, whole: Path, seed: int
) -> None:
    """Twice at a random moment, twice while a checkpoint is being written."""
    cell = make_cell(parameters=LONG)
    chooser = random.Random(seed)
    checkpoints = cell / "checkpoints"
    for while_saving in (True, False, True, False):
        process = cells.start(cell, data_root)
        wait_for(steps_reported(cell, 1 + count_losses(cell)), process)
        if while_saving:
            wait_for(lambda: any(checkpoints.glob(".writing-*")), process)
            time.sleep(chooser.uniform(0, 0.01))
        else:
            time.sleep(chooser.uniform(0, 0.3))
        process.kill()
        process.wait()
    assert cells.start(cell, data_root).wait(SECONDS) == 0
    assert not list(checkpoints.glob(".*"))
    assert cells.events(cell, "damaged") == []
    assert cells.metrics(cell) == cells.metrics(whole)
    assert cells.weights(cell) == cells.weights(whole)


def run_ranks(
    cell: Path, data_root: Path, world_size: int, stop_after: int | None = None
) -> list[int]:
    """Run all ranks; ``stop_after`` sends one of them a signal after so many logged losses."""
    port = cells.free_port()
    ranks = [cells.start(cell, data_root, rank, world_size, port) for rank in range(world_size)]
    try:
        if stop_after is not None:
            wait_for(steps_reported(cell, stop_after), ranks[0])
            ranks[-1].send_signal(signal.SIGUSR1)
        return [process.wait(SECONDS) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


def assert_same_losses(one: Path, other: Path) -> None:
    expected, actual = cells.metrics(one), cells.metrics(other)
    assert actual.keys() == expected.keys()
    for step, values in expected.items():
        for name in ("loss", "eval_loss"):
            if name in values:
                assert actual[step][name] == pytest.approx(values[name], abs=1e-5)


def test_two_processes_train_like_one(make_cell: MakeCell, data_root: Path) -> None:
    parameters = {"max_steps": 60, "eval_steps": 30, "save_steps": 20}
    one = make_cell("one", parameters=parameters)
    assert cells.train(one, data_root) == 0
    two = make_cell("two", parameters=parameters)
    assert run_ranks(two, data_root, 2) == [0, 0]
    assert_same_losses(one, two)


def test_ranks_stop_at_the_same_step_and_continue_to_the_last_bit(
    make_cell: MakeCell, data_root: Path
) -> None:
    # Three ranks: the order in which their gradients are added matters.
    parameters = {"max_steps": 150, "eval_steps": 50, "global_batch_size": 6, "dropout": 0.1}
    whole = make_cell("whole", parameters=parameters)
    assert run_ranks(whole, data_root, 3) == [0, 0, 0]
    parts = make_cell("parts", parameters=parameters)
    assert run_ranks(parts, data_root, 3, stop_after=3) == [75, 75, 75]
    assert cells.events(parts, "checkpoint")[-1]["step"] < 150
    assert run_ranks(parts, data_root, 3) == [0, 0, 0]
    assert cells.metrics(parts) == cells.metrics(whole)
    assert cells.weights(parts) == cells.weights(whole)


def test_another_number_of_ranks_continues(make_cell: MakeCell, data_root: Path) -> None:
    parameters = {"max_steps": 40, "eval_steps": 40}
    whole = make_cell("whole", parameters=parameters)
    assert cells.train(whole, data_root) == 0
    parts = make_cell("parts", parameters=parameters)
    assert cells.train(parts, data_root, stop_after=18) == 75
    assert run_ranks(parts, data_root, 2) == [0, 0]
    assert_same_losses(whole, parts)


def test_too_little_memory_of_the_machine_has_an_exit_code_of_its_own(
    make_cell: MakeCell, data_root: Path
) -> None:
    # More than a terabyte, which no kernel promises.
    cell = make_cell(parameters={"intermediate_size": 10**10})
    assert cells.start(cell, data_root).wait(SECONDS) == 71
    assert "allocate memory" in (cell / "log.0").read_text().splitlines()[-1]


def test_too_little_memory_of_a_gpu_has_it_too(make_cell: MakeCell) -> None:
    """The engine is another one: here is no GPU whose memory could be too small."""
    program = (
        "import sys, torch\nfrom hpcml.train import torch_engine\n"
        "def run(job, stop): raise torch.OutOfMemoryError('CUDA out of memory. Tried to …')\n"
        "torch_engine.run = run\nimport hpcml.train.__main__ as train\nsys.exit(train.main())"
    )
    environment = {**os.environ, "HPCML_CELL_DIR": str(make_cell())}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, text=True, capture_output=True
    )
    assert done.returncode == 71, done.stderr
    assert done.stderr.splitlines()[-1] == "hpcml.train: CUDA out of memory. Tried to …"


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (
            RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be reported late"),
            True,
        ),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
    ],
)
def test_how_a_lack_of_memory_is_known(error: Exception, lacks: bool) -> None:
    assert lacks_memory(error) is lacks


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"engine": "abacus"}, "no engine is called"),
        ({"model": "missing"}, "no model at missing"),
        ({"data": {"files": ["nothing/*.txt"]}}, "no file matches"),
        ({"parameters": {**cells.TINY, "learning_rate": 1e30}}, "the loss became"),
        ({"parameters": {**cells.TINY, "fp16": True}}, "fp16 needs a GPU"),
    ],
)
def test_mistakes_are_told_in_one_line(
    make_cell: MakeCell, data_root: Path, change: dict[str, object], says: str
) -> None:
    import json

    cell = make_cell()
    content = json.loads((cell / "cell.json").read_text())
    for key, value in change.items():
        if isinstance(value, dict) and key != "parameters":
            content["payload"][key].update(value)
        else:
            content["payload"][key] = value
    (cell / "cell.json").write_text(json.dumps(content))
    assert cells.start(cell, data_root).wait(SECONDS) == 1
    lines = (cell / "log.0").read_text().splitlines()
    assert lines[-1].startswith("hpcml.train: ")
    assert says in lines[-1]
    assert not any("Traceback" in line for line in lines)
    shutil.rmtree(cell)
