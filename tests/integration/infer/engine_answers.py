"""Run by the Python that has the engine: questions of many kinds; prints what came back.

python engine_answers.py vllm|sglang MODEL [ADAPTER]
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hpcml.infer.engine import EngineConfig, EngineError, Request, make_engine

ARGUMENTS = {
    "vllm": {
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 256 << 20,
        "max_model_len": 512,
        "structured_outputs_config": {"backend": "xgrammar", "disable_any_whitespace": True},
    },
    "sglang": {
        "device": "cpu",
        "dtype": "float32",
        "attention_backend": "torch_native",
        "sampling_backend": "pytorch",
        "disable_cuda_graph": True,
        "max_total_tokens": 16384,
        "context_length": 512,
        "skip_server_warmup": True,
        "constrained_json_disable_any_whitespace": True,
        "log_level": "error",
    },
}
PLAIN = {"temperature": 0.0, "max_tokens": 12, "n": 1}
DRAWN = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "max_tokens": 12, "n": 2}
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "boolean"}},
    "required": ["a"],
    "additionalProperties": False,
}


def requests() -> list[tuple[str, dict[str, Any]]]:
    """Questions by name of what is tried."""
    first = [("plain", PLAIN), ("drawn", DRAWN), ("logprobs", {**PLAIN, "logprobs": True})]
    forms = [
        ("regex", {**PLAIN, "regex": "[0-9]{3}-[0-9]{2}"}),
        ("choice", {**PLAIN, "choice": ["yes", "no"]}),
        ("json", {**PLAIN, "json_schema": SCHEMA, "max_tokens": 40}),
        ("grammar", {**PLAIN, "grammar": 'root ::= "a" "b"+ "c"', "max_tokens": 60}),
    ]
    others = [
        ("longer", {**PLAIN, "max_tokens": 80}),
        (
            "penalties",
            {**PLAIN, "max_tokens": 80, "presence_penalty": 2.0, "frequency_penalty": 2.0},
        ),
        ("repetition", {**PLAIN, "repetition_penalty": 1.8}),
        ("longer repetition", {**PLAIN, "max_tokens": 80, "repetition_penalty": 1.8}),
        ("minimum", {**PLAIN, "min_tokens": 12}),
        ("stop", {**PLAIN, "stop": ["7"], "max_tokens": 40}),
        ("bad", {**PLAIN, "regex": "(("}),
        ("long", PLAIN),
    ]
    return first + forms + others


def ask(engine: Any, asked: list[Request]) -> dict[int, Any]:
    """All answers by row."""
    found = {answer.row: answer for answer in engine.add(asked)}
    while len(found) < len(asked):
        found |= {answer.row: answer for answer in engine.step()}
    return found


def main() -> None:
    """Print a JSON object of answers by name."""
    name, model = sys.argv[1], Path(sys.argv[2])
    adapter = Path(sys.argv[3]) if len(sys.argv) > 3 else None
    arguments = ARGUMENTS[name]
    config = EngineConfig(name, model, adapter, {}, arguments, None)
    printed: dict[str, Any] = {}
    for wrong in ({"max_num_seq": 4}, {"tensor_parallel_size": 2}, {"tp_size": 2}):
        try:
            make_engine(EngineConfig(name, model, None, {}, {**arguments, **wrong}, None))
        except EngineError as error:
            printed[f"refused {next(iter(wrong))}"] = str(error)
    engine = make_engine(config)
    text = "what is the capital of the red house?"
    asked = [
        Request(number, text if name != "long" else text * 200, False, parameters, seed=5)
        for number, (name, parameters) in enumerate(requests())
    ]
    found = ask(engine, asked)
    for request, (name, _) in zip(asked, requests(), strict=True):
        printed[name] = asdict(found[request.row])
    chat = json.dumps([{"role": "user", "content": text}])
    printed["chat"] = asdict(ask(engine, [Request(0, chat, True, PLAIN, 0)])[0])
    # The same draws, alone and among many others.
    many = [Request(number, f"{number} {text}", False, DRAWN, seed=number) for number in range(30)]
    together = ask(engine, many)
    alone = {request.row: ask(engine, [request])[request.row] for request in many[::7]}
    printed["draws"] = [(together[row].text, answer.text) for row, answer in sorted(alone.items())]
    print("\n" + json.dumps(printed))


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    os._exit(0)
