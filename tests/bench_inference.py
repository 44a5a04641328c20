"""One measurement of batch inference in a process of its own; prints a number.

python bench_inference.py hpcml|plain|ordered|unordered|merge FOLDER

``hpcml``, ``ordered`` and ``unordered`` print tokens per second of the whole payload with an engine
that is up: reading, planning, answering, merging. ``plain`` is ``LLM.generate`` with all rows in
memory. ``merge`` prints rows per second.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import time
from pathlib import Path

ROWS, TOKENS = 300, 48
PREFIXES, PREFIX_TOKENS, PREFIX_ROWS = 50, 400, 400
ARGUMENTS = {
    "dtype": "float32",
    "enforce_eager": True,
    "kv_cache_memory_bytes": 64 << 20,
    "max_model_len": 512,
    "max_num_seqs": 16,
    "enable_chunked_prefill": False,
}
PARAMETERS = {"temperature": 0.0, "n": 1, "seed": 0, "max_tokens": TOKENS, "min_tokens": TOKENS}


def texts(kind: str) -> list[str]:
    """The questions of a workload."""
    chooser = random.Random(0)
    words = ("what", "is", "the", "capital", "of", "a", "river", "seven", "plus", "red", "house")
    if kind in ("hpcml", "plain"):
        return [" ".join(chooser.choices(words, k=chooser.randint(20, 100))) for _ in range(ROWS)]
    prefixes = [" ".join(chooser.choices(words, k=PREFIX_TOKENS)) for _ in range(PREFIXES)]
    found = [f"{prefixes[n % PREFIXES]} {n}" for n in range(PREFIX_ROWS)]
    chooser.shuffle(found)
    return found


def payload(kind: str, folder: Path) -> float:
    """Tokens per second of the whole payload."""
    import numpy as np

    from hpcml.infer import order
    from hpcml.infer.engine import EngineConfig
    from hpcml.infer.process import EngineProcess
    from hpcml.infer.runner import Runner
    from tests.unit.infer.jobs import Never, hold, make_job, proof, write_input

    if kind == "unordered":
        order.by_prefix = lambda levels: np.arange(len(levels[0]))  # type: ignore[assignment]
    few = {"max_tokens": 2, "min_tokens": 2} if kind != "hpcml" else {}
    job_folder = folder / kind
    shutil.rmtree(job_folder, ignore_errors=True)
    write_input(job_folder, texts(kind))
    parameters = {**PARAMETERS, **few}
    job = make_job(job_folder, parameters=parameters, model=folder / "model")
    engine = EngineProcess(
        EngineConfig("vllm", folder / "model", None, parameters, ARGUMENTS, None)
    )
    while not engine.ready:
        engine.poll(1.0)
    held = hold(job)
    begun = time.perf_counter()
    code = Runner(job, Never(), lambda: engine).run()
    seconds = time.perf_counter() - begun
    os.close(held)
    found = proof(job)
    assert code == found["failed"] == 0
    return (found["prompt_tokens"] + found["output_tokens"]) / seconds


def plain(folder: Path) -> float:
    """Tokens per second of vLLM alone."""
    from vllm import LLM, SamplingParams

    llm = LLM(str(folder / "model"), disable_log_stats=True, **ARGUMENTS)
    settings = SamplingParams(temperature=0, max_tokens=TOKENS, min_tokens=TOKENS)
    questions = texts("plain")
    begun = time.perf_counter()
    outputs = llm.generate(questions, settings, use_tqdm=False)
    seconds = time.perf_counter() - begun
    tokens = sum(len(o.prompt_token_ids) + len(o.outputs[0].token_ids) for o in outputs)
    return tokens / seconds


def merging(folder: Path) -> float:
    """Rows per second of the merge of half a million answers that are not in order."""
    from hpcml.infer.merge import merge
    from hpcml.infer.rounds import current_round
    from hpcml.infer.runner import Runner
    from tests.unit.infer.jobs import Never, StandIn, hold, make_job, write_input

    rows = 500_000
    here = folder / "merge"
    prefixes = [f"{number} " * 200 for number in range(7)]
    write_input(here, [f"{prefixes[n % 7] if n % 5 == 0 else ''}what is {n}?" for n in range(rows)])
    job = make_job(here)
    held = hold(job)
    assert Runner(job, Never(), lambda: StandIn(512)).run() == 0
    os.close(held)
    this = current_round(job.cell_dir)
    plan = this.plan()
    assert plan is not None
    assert not plan.in_order
    begun = time.perf_counter()
    merge(job, this, plan)
    return rows / (time.perf_counter() - begun)


def main() -> None:
    """Print the number."""
    kind, folder = sys.argv[1], Path(sys.argv[2])
    measured = (
        plain(folder)
        if kind == "plain"
        else merging(folder)
        if kind == "merge"
        else payload(kind, folder)
    )
    print(f"\n{measured}", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
