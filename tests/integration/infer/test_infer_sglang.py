"""The genuine SGLang in its own environment, which the Makefile makes.

Its builds are for GPUs; ``sglang_on_cpu`` stands in for what is compiled, in these tests alone.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import REPOSITORY

from .conftest import Asking
from .engine_answers import ARGUMENTS
from .ties import check_same_but_ties

PYTHON = REPOSITORY / ".venv-sglang" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".venv-sglang" / "made").exists(),
    reason="SGLang has an environment of its own; make test-sglang makes it",
)
HERE = Path(__file__).parent
ENVIRONMENT = {
    "PYTHONPATH": f"{HERE / 'sglang_on_cpu'}:{REPOSITORY}",
    "OMP_NUM_THREADS": "1",
    "SGLANG_USE_CPU_ENGINE": "1",
}


@pytest.fixture(scope="module")
def found(model: Path) -> dict[str, Any]:
    """What one engine answered to questions of all kinds."""
    result = subprocess.run(
        [PYTHON, HERE / "engine_answers.py", "sglang", model],
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    answers: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return answers


def test_what_can_be_asked(found: dict[str, Any]) -> None:
    plain = found["plain"]
    assert len(plain["text"]) == 1
    assert plain["finish_reason"] in (["stop"], ["length"])
    assert len(found["drawn"]["text"]) == 2
    assert found["drawn"]["text"][0] != found["drawn"]["text"][1]
    assert found["logprobs"]["text"] == plain["text"]
    (logprobs,) = found["logprobs"]["logprobs"]
    assert len(logprobs) == plain["output_tokens"][0]
    assert all(-10 < value <= 0 for value in logprobs)
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", found["regex"]["text"][0])
    assert isinstance(json.loads(found["json"]["text"][0])["a"], bool)
    assert re.match("ab+c?", found["grammar"]["text"][0])
    assert found["penalties"]["text"] != found["longer"]["text"]
    # It counts repetitions within the answer alone, so that a short one has none.
    assert found["longer repetition"]["text"] != found["longer"]["text"]
    assert found["minimum"]["output_tokens"] == [12]
    assert "7" not in found["stop"]["text"][0]
    assert found["stop"]["finish_reason"] == ["stop"]
    assert found["chat"]["text"] != plain["text"]


def test_what_is_refused(found: dict[str, Any]) -> None:
    assert found["bad"]["cause"] == "engine"
    assert found["long"]["cause"] == "too_long"
    assert "has no such argument" in found["refused max_num_seq"]
    assert "params.tensor_parallel_size" in found["refused tp_size"]


def test_the_same_answers_as_transformers(asking: Asking, new_asking: Callable[[], Asking]) -> None:
    other = new_asking()
    params = {"temperature": 0, "max_tokens": 16}
    for each in (asking, other):
        each.input(600)
    asking.hpcml.write("site.yaml", f"name: v\nscheduler: local\npython: {PYTHON}\n")
    asking.hpcml.environment.update(ENVIRONMENT)
    asking.recipe(params=params, engine="sglang", engine_args=ARGUMENTS["sglang"])
    asking("--site", "site.yaml")
    other.recipe(params=params)
    other()
    check_same_but_ties(asking.answers(), other.answers(), asking.model, tokens=16)
    assert asking.merged()["rows_out"] == 600
