"""Every row is answered exactly once, whatever is killed."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import time
from collections.abc import Callable

from tests.conftest import kill, of_folder, wait_until

from .conftest import Asking

ROWS = 320
PARAMS = {"temperature": 0, "max_tokens": 24}


def finished(asking: Asking) -> int:
    """Rows that are on disk."""
    cells = asking.hpcml.folder / "runs"
    lines = 0
    for path in cells.glob("*/*/cells/*/rounds/*/journals/*.jsonl"):
        with contextlib.suppress(FileNotFoundError):  # it has just become a part
            lines += path.read_bytes().count(b"\n")
    return lines + sum(1 for _ in cells.glob("*/*/cells/*/rounds/*/parts/*.arrow"))


def test_killed_again_and_again(asking: Asking, new_asking: Callable[[], Asking]) -> None:
    undisturbed = new_asking()
    for each in (asking, undisturbed):
        each.input(ROWS)
        each.recipe(params=PARAMS, workers=2, shard_rows=32)
    undisturbed()
    chooser = random.Random(3)
    # The engine, the payload, the worker, the batch script, the command itself.
    words = ("hpcml.infer.process", "hpcml.infer", "hpcml.worker", "scripts/0", "hpcml infer")
    kills = 0
    for _ in range(20):
        process = asking.hpcml.start("infer", "--batch", "ask.yaml")
        # While it starts, or soon after it has written rows; a fast machine is done a little later.
        before, deadline = finished(asking), time.monotonic() + chooser.uniform(2, 5)
        while process.poll() is None and time.monotonic() < deadline:
            if finished(asking) > before:
                time.sleep(chooser.uniform(0, 0.2))
                break
            time.sleep(0.05)
        if process.poll() is None:
            word = chooser.choice(words)
            victims = (
                [process.pid] if word == "hpcml infer" else of_folder(asking.hpcml.folder, word)
            )
            if victims:
                kill(chooser.choice(victims))
                kills += 1
            time.sleep(chooser.uniform(0, 1))
            process.send_signal(signal.SIGKILL)
        process.communicate()
        if (asking.cell / "result.json").exists():
            break
    asking()
    assert kills >= 3
    proof = asking.merged()
    assert (proof["rows_in"], proof["rows_out"], proof["duplicates"]) == (ROWS, ROWS, 0)
    assert [row["key"] for row in asking.output()] == [f"key{number}" for number in range(ROWS)]
    assert asking.answers() == undisturbed.answers()


def test_a_stop_loses_no_row_and_asks_none_twice(asking: Asking) -> None:
    asking.input(ROWS)
    asking.recipe(params=PARAMS, workers=2, shard_rows=32)
    process = asking.hpcml.start("infer", "--batch", "ask.yaml")
    wait_until(lambda: any(asking.hpcml.folder.glob("runs/*/*/cells/*/rounds/1/parts/*.arrow")))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=60)
    assert process.returncode == 130
    before = finished(asking)
    assert 0 < before < ROWS
    asking()
    counted = [
        json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])
        for folder in asking.cell.glob("workers/*")
    ]
    # What a batch that was cut off had computed is computed again; what was written is not.
    assert sum(record["step"] for record in counted) == ROWS
    assert asking.merged()["rows_out"] == ROWS
