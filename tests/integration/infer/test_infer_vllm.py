"""The genuine vLLM on CPUs, in its own environment, which the Makefile makes."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.conftest import REPOSITORY, kill, of_folder, wait_until

from .conftest import Asking
from .ties import check_same_but_ties

PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
pytestmark = pytest.mark.skipif(
    not (REPOSITORY / ".venv-vllm" / "made").exists(),
    reason="vLLM has an environment of its own; make .venv-vllm/made makes it",
)
ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 256 << 20,
    "max_model_len": 512,
}
TEXT = "what is the capital of the red house?"


@pytest.fixture
def adapter(model: Path, tmp_path: Path) -> Path:
    """A LoRA adapter that changes the answers."""
    torch.manual_seed(1)
    base = AutoModelForCausalLM.from_pretrained(model)
    tuned = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    for name, weights in tuned.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weights, std=0.5)
    tuned.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def expected(model: Any, folder: Path, text: str = TEXT, **settings: Any) -> str:
    """What transformers answers."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(text, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        tokens = model.generate(
            **inputs, max_new_tokens=12, do_sample=False, pad_token_id=0, **settings
        )
    new = tokens[0, inputs["input_ids"].shape[1] :]
    return str(tokenizer.decode(new, skip_special_tokens=True))


def answers(*arguments: Path) -> dict[str, Any]:
    result = subprocess.run(
        [PYTHON, Path(__file__).with_name("engine_answers.py"), "vllm", *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    found: dict[str, Any] = json.loads(result.stdout.splitlines()[-1])
    return found


def test_what_can_be_asked(model: Path) -> None:
    found = answers(model)
    plain = found["plain"]
    llama = AutoModelForCausalLM.from_pretrained(model)
    assert plain["text"] == [expected(llama, model)]
    assert len(found["drawn"]["text"]) == 2
    assert found["drawn"]["text"][0] != found["drawn"]["text"][1]
    assert all(together == alone for together, alone in found["draws"])
    assert len({str(pair) for pair in found["draws"]}) == len(found["draws"])
    assert found["logprobs"]["text"] == plain["text"]
    (logprobs,) = found["logprobs"]["logprobs"]
    assert len(logprobs) == plain["output_tokens"][0]
    assert all(-10 < value <= 0 for value in logprobs)
    assert re.fullmatch("[0-9]{3}-[0-9]{2}", found["regex"]["text"][0])
    assert found["choice"]["text"][0] in ("yes", "no")
    assert isinstance(json.loads(found["json"]["text"][0])["a"], bool)
    assert re.match("ab+c?", found["grammar"]["text"][0])
    assert found["penalties"]["text"] != found["longer"]["text"]
    assert found["repetition"]["text"] == [expected(llama, model, repetition_penalty=1.8)]
    assert found["minimum"]["output_tokens"] == [12]
    assert "7" not in found["stop"]["text"][0]
    assert found["stop"]["finish_reason"] == ["stop"]
    assert found["bad"]["cause"] == "engine"
    assert found["long"]["cause"] == "too_long"
    template = "<|user|>" + TEXT + "<|end|><|assistant|>"
    assert found["chat"]["text"] == [expected(llama, model, template)]
    assert "max_num_seqs" in found["refused max_num_seq"]
    assert "params.tensor_parallel_size" in found["refused tensor_parallel_size"]


def test_an_adapter(model: Path, adapter: Path) -> None:
    from peft import PeftModel

    tuned = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), adapter)
    theirs = expected(tuned, model)
    assert answers(model, adapter)["plain"]["text"] == [theirs]
    assert theirs != expected(AutoModelForCausalLM.from_pretrained(model), model)


def test_the_same_answers_as_transformers(asking: Asking, new_asking: Callable[[], Asking]) -> None:
    """And the engine is killed once, which costs nothing."""
    other = new_asking()
    params = {"temperature": 0, "max_tokens": 16}
    for each in (asking, other):
        each.input(600)
    asking.hpcml.write("site.yaml", f"name: v\nscheduler: local\npython: {PYTHON}\n")
    asking.recipe(params=params, engine="vllm", engine_args={**ARGUMENTS, "max_num_seqs": 8})
    process = asking.hpcml.start("infer", "--batch", "ask.yaml", "--site", "site.yaml")
    other.recipe(params=params)
    other()
    parts = "runs/*/*/cells/*/rounds/1/parts/*.arrow"
    wait_until(lambda: any(asking.hpcml.folder.glob(parts)) or process.poll() is not None, 300)
    for pid in of_folder(asking.hpcml.folder, "hpcml.infer.process"):
        kill(pid)
    time.sleep(0.1)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    log = (asking.cell / "workers/0/log.1.out").read_text()
    assert "the engine died (signal 9)" in log
    theirs, mine = other.answers(), asking.answers()
    check_same_but_ties(mine, theirs, asking.model, tokens=16)
    assert asking.merged()["rows_out"] == 600
