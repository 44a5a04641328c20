"""What hpcml costs, against what it stands on. ``make bench`` prints the table.

Whatever is compared is measured in turn, A B A B, in one run, so that a machine whose speed
drifts does not favour one side. Figures are medians.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import operator
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).resolve().parents[1]
PYTHON = sys.executable
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
# What pip installs is compiled; hpcml's own modules are after the first, unmeasured round.
ENVIRONMENT.pop("PYTHONDONTWRITEBYTECODE", None)
CLUSTER = REPOSITORY / "tests/cluster/slurm"

VLLM_PYTHON = REPOSITORY / ".venv-vllm" / "bin" / "python"
VLLM_ENVIRONMENT = {**ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
VLLM_OPTIONS = {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 16}

SEQUENCES, LENGTH, STEPS, WARM = 8, 128, 120, 20


class Row(NamedTuple):
    """A line of the table."""

    what: str
    measured: str
    wanted: str


def seconds(command: list[str], folder: Path) -> float:
    """Wall-clock time of a whole process."""
    begun = time.perf_counter()
    subprocess.run(command, cwd=folder, env=ENVIRONMENT, check=True, capture_output=True)
    return time.perf_counter() - begun


def paired(first: Callable[[], float], second: Callable[[], float], rounds: int) -> list[float]:
    """Medians of both and of the ratio first/second, pair by pair."""
    pairs = [(first(), second()) for _ in range(rounds + 1)][1:]
    return [
        statistics.median(pair[0] for pair in pairs),
        statistics.median(pair[1] for pair in pairs),
        statistics.median(pair[0] / pair[1] for pair in pairs),
    ]


def command_line(folder: Path) -> Iterator[Row]:
    """`hpcml --help`, and the preview of a large sweep."""
    mine, bare, ratio = paired(
        lambda: seconds([PYTHON, "-m", "hpcml", "--help"], folder),
        lambda: seconds([PYTHON, "-c", "import click, yaml, jinja2"], folder),
        15,
    )
    yield Row(
        "`hpcml --help` against importing click, yaml, jinja2",
        f"{mine * 1e3:.0f} ms, {bare * 1e3:.0f} ms: {ratio:.2f}x",
        "at most 3x",
    )
    (folder / "large.yaml").write_text(
        "name: large\nkind: command\n"
        f"sweep: {{grid: {{a: {list(range(100))}, b: {list(range(100))}}}}}\n"
        'command: {run: [echo, "{{ params.a }}", "{{ params.b }}"]}\n'
    )
    command = [PYTHON, "-m", "hpcml", "sweep", "large.yaml", "--dry-run"]
    taken = statistics.median(seconds(command, folder) for _ in range(5))
    yield Row("`--dry-run` of 10,000 cells", f"{taken:.2f} s", "below 1.5 s")


def overhead(folder: Path) -> Iterator[Row]:
    """From the end of one cell's program to the beginning of the next one's, one at a time."""
    cells = 30
    (folder / "cells.yaml").write_text(
        f"name: cells\nkind: command\nsweep: {{grid: {{n: {list(range(cells))}}}}}\n"
        "array: {max_running: 1}\ncommand: {run: [date, '+%s.%N']}\n"
    )
    seconds([PYTHON, "-m", "hpcml", "sweep", "cells.yaml"], folder)
    times = sorted(
        float(path.read_text()) for path in folder.glob("runs/cells/*/cells/*/log.1.out")
    )
    gaps = [after - before for before, after in itertools.pairwise(times)]
    assert len(times) == cells
    yield Row("overhead of a local cell", f"{statistics.median(gaps):.2f} s", "below 0.3 s")


BARE = """
import json, sys, time
from pathlib import Path
import numpy as np
import torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
from hpcml.data.dataset import PackedSamples, TokenFile

sequences, length, steps, warm = map(int, sys.argv[2:])


class Sequences(torch.utils.data.Dataset):
    def __init__(self, folder):
        self.samples = PackedSamples(TokenFile(Path(folder) / "train.arrow"), length)

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        inputs, _ = self.samples.batch(np.array([index]))
        return {"input_ids": torch.from_numpy(inputs[0]), "labels": torch.from_numpy(inputs[0])}


class Clock(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == warm:
            self.begun = time.perf_counter()
        if state.global_step == steps:
            self.taken = time.perf_counter() - self.begun


transformers.utils.logging.set_verbosity_error()
config = LlamaConfig(
    vocab_size=2000, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=length,
)
clock = Clock()
Trainer(
    LlamaForCausalLM(config),
    TrainingArguments(
        output_dir="bare", max_steps=steps, per_device_train_batch_size=sequences, use_cpu=True,
        report_to="none", disable_tqdm=True, save_strategy="no", logging_steps=10,
        learning_rate=1e-3,
    ),
    train_dataset=Sequences(sys.argv[1]),
    callbacks=[clock],
).train()
print(json.dumps(clock.taken / (steps - warm)))
"""


def training(folder: Path) -> Iterator[Row]:
    """A step of hpcml's training against a bare Trainer's: same model, same batch, same data."""
    recipe = folder / "train.yaml"
    recipe.write_text(
        "name: step\nkind: train\n"
        f"params: {{global_batch_size: {SEQUENCES}, max_length: {LENGTH}, max_steps: {STEPS}, "
        "vocab_size: 2000, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, "
        f"num_attention_heads: 4, num_key_value_heads: 4, save_steps: {STEPS}, logging_steps: 10, "
        "eval_strategy: 'no'}\n"
        "sweep: {grid: {seed: [0]}}\n"
        "train: {engine: torch, data: {source: python-stdlib}}\n"
    )
    round_number = 0

    def mine() -> float:
        nonlocal round_number
        round_number += 1
        seed = f"sweep.grid.seed=[{round_number}]"
        seconds([PYTHON, "-m", "hpcml", "sweep", "train.yaml", "--set", seed], folder)
        newest = max(folder.glob("runs/step/*/cells/*/metrics.jsonl"), key=os.path.getmtime)
        lines = [json.loads(line) for line in newest.read_text().splitlines()]
        speeds = [
            line["tokens_per_second"]
            for line in lines
            if line["step"] > WARM and "tokens_per_second" in line
        ]
        return statistics.mean(SEQUENCES * LENGTH / speed for speed in speeds)

    def bare() -> float:
        (data,) = folder.glob("runs/.data/*/dataset.json")
        arguments = [str(data.parent), *map(str, (SEQUENCES, LENGTH, STEPS, WARM))]
        result = subprocess.run(
            [PYTHON, "-c", BARE, *arguments],
            cwd=folder,
            env=ENVIRONMENT,
            check=True,
            capture_output=True,
            text=True,
        )
        return float(result.stdout.splitlines()[-1])

    own, plain, ratio = paired(mine, bare, 5)
    yield Row(
        "a training step against a bare `Trainer`'s",
        f"{own * 1e3:.1f} ms, {plain * 1e3:.1f} ms: {ratio:.3f}x",
        "at most 1.02x",
    )


LOADING = """
import sys, time
from pathlib import Path
from hpcml.data.dataset import PackedSamples, TokenFile
from hpcml.data.sampler import Sampler

samples = PackedSamples(TokenFile(Path(sys.argv[1]) / "train.arrow"), 1024)
sampler = Sampler(len(samples), 0, 32, None)
begun = time.perf_counter()
for step in range(400):
    samples.batch(sampler.micro_batch(step, 0, 0, 1, 32))
print(400 * 32 * 1024 / (time.perf_counter() - begun))
"""


def loading(folder: Path) -> Iterator[Row]:
    """Tokens per second of the loader alone, in random order, on one core."""
    (data,) = folder.glob("runs/.data/*/dataset.json")
    speeds = [
        float(
            subprocess.run(
                [PYTHON, "-c", LOADING, str(data.parent)],
                env=ENVIRONMENT,
                check=True,
                capture_output=True,
                text=True,
            ).stdout
        )
        for _ in range(3)
    ]
    speed = statistics.median(speeds)
    yield Row("loading tokens, one core", f"{speed / 1e6:.0f} million/s", "above 5 million/s")


def inference(folder: Path) -> Iterator[Row]:
    """Batch inference against vLLM by itself, on CPUs, with a small random model."""
    sys.path.append(str(REPOSITORY))
    from tests.infer_models import make_model

    make_model(folder / "model", width=384, layers=6)

    def measure(kind: str, python: str | Path = VLLM_PYTHON) -> float:
        result = subprocess.run(
            [python, REPOSITORY / "tests" / "bench_inference.py", kind, folder],
            env=VLLM_ENVIRONMENT,
            check=True,
            capture_output=True,
            text=True,
        )
        return float(result.stdout.splitlines()[-1])

    own, bare, ratio = paired(lambda: measure("hpcml"), lambda: measure("plain"), 5)
    yield Row(
        "tokens/s of an inference with vLLM, against `LLM.generate`",
        f"{own:,.0f}, {bare:,.0f}: {ratio:.3f}x",
        "at least 0.97x",
    )
    own, bare, ratio = paired(lambda: measure("ordered"), lambda: measure("unordered"), 3)
    yield Row(
        "50 beginnings of 400 tokens, against the order of the input",
        f"{own:,.0f}, {bare:,.0f}: {ratio:.2f}x",
        "at least 1.5x",
    )
    own, bare, ratio = paired(lambda: whole_inference(folder), lambda: run_batch(folder), 3)
    yield Row(
        "`hpcml infer` from start to end, and `vllm run-batch`, on the same file",
        f"{own:.1f} s, {bare:.1f} s: {ratio:.2f}x",
        "",
    )
    speed = statistics.median(measure("merge", PYTHON) for _ in range(3))
    yield Row("merging answers that are not in order", f"{speed:,.0f} rows/s", "above 500,000")


def batch_file(folder: Path) -> Path:
    """Questions for the chat endpoint, in the format of OpenAI."""
    path = folder / "batch.jsonl"
    lines = []
    for number in range(200):
        messages = [{"role": "user", "content": f"{number}: what is the capital of a river?"}]
        body = {"model": "m", "messages": messages, "max_tokens": 32, "temperature": 0}
        line = {"custom_id": f"r{number}", "method": "POST", "url": "/v1/chat/completions"}
        lines.append(json.dumps({**line, "body": body}) + "\n")
    path.write_text("".join(lines))
    return path


def whole_inference(folder: Path) -> float:
    """Seconds of `hpcml infer` for a batch file."""
    arguments = {**VLLM_OPTIONS, "enforce_eager": True, "kv_cache_memory_bytes": 2**27}
    recipe = {
        "name": "batch",
        "kind": "infer",
        "params": {"temperature": 0},
        "infer": {
            "engine": "vllm",
            "model": str(folder / "model"),
            "input": {"files": str(batch_file(folder)), "format": "openai"},
            "output": {"format": "openai"},
            "engine_args": arguments,
        },
    }
    (folder / "batch.yaml").write_text(json.dumps(recipe))
    (folder / "vllm.yaml").write_text(f"name: v\nscheduler: local\npython: {VLLM_PYTHON}\n")
    shutil.rmtree(folder / "runs" / "batch", ignore_errors=True)
    command = [PYTHON, "-m", "hpcml", "infer", "--batch", "batch.yaml", "--site", "vllm.yaml"]
    begun = time.perf_counter()
    subprocess.run(command, cwd=folder, env=VLLM_ENVIRONMENT, check=True, capture_output=True)
    return time.perf_counter() - begun


def run_batch(folder: Path) -> float:
    """Seconds of vLLM's own program for the same file."""
    options = [f"--{name.replace('_', '-')}={value}" for name, value in VLLM_OPTIONS.items()]
    command = [
        *(str(VLLM_PYTHON), "-m", "vllm.entrypoints.openai.run_batch"),
        *("-i", str(batch_file(folder)), "-o", str(folder / "answers.jsonl")),
        *("--model", str(folder / "model"), "--served-model-name", "m"),
        *("--enforce-eager", "--kv-cache-memory-bytes=134217728", *options),
    ]
    begun = time.perf_counter()
    subprocess.run(command, cwd=folder, env=VLLM_ENVIRONMENT, check=True, capture_output=True)
    return time.perf_counter() - begun


SUBMITIT = """
import itertools
import sys
import submitit

executor = submitit.SlurmExecutor(folder="submitit")
executor.update_parameters(
    time=1, array_parallelism=50, job_name="hpcml-bench", additional_parameters={"hold": True}
)
cells = list(itertools.product(range(int(sys.argv[1])), range(100)))
for first in range(0, len(cells), 1000):
    executor.map_array(print, *zip(*cells[first:first + 1000]))
"""

HYDRA = """
import hydra

@hydra.main(version_base=None, config_path=None)
def main(config):
    print(config.a, config.b)

main()
"""

# The end of a submission is the end of sbatch: hydra goes on, waiting for the results.
SBATCH = """#!/bin/sh
"{sbatch}" "$@" && touch "{done}"
"""

SITE = """
name: bench
scheduler: slurm
slurm: {max_array_size: 1001}
"""


def slurm(folder: Path) -> Iterator[Row]:
    """Submitting to a Slurm, against submitit's own executor and hydra's launcher.

    The jobs are held, and removed afterwards. All submit the product of two lists.
    """
    # A folder of its own: what lies beside the recipe is copied for the run.
    recipe = folder / "held"
    recipe.mkdir()
    (recipe / "site.yaml").write_text(SITE)
    sweep = [PYTHON, "-m", "hpcml", "sweep", "held.yaml", "--site", "site.yaml", "--root"]
    new = folder / "new"  # for each submission, so that none finds what another has left

    def mine() -> float:
        taken = seconds([*sweep, str(new)], recipe)
        shutil.rmtree(new)
        remove_jobs()
        return taken

    def theirs() -> float:
        new.mkdir()
        taken = seconds([PYTHON, "-c", SUBMITIT, str(cells // 100)], new)
        shutil.rmtree(new)
        remove_jobs()
        return taken

    for cells, rounds, wanted in ((1000, 7, "at most 2x"), (10_000, 5, "at most 0.33x")):
        (recipe / "held.yaml").write_text(
            "name: hpcml-bench\nkind: command\nresources: {time: 1m}\narray: {max_running: 50}\n"
            f"sweep: {{grid: {{a: {list(range(cells // 100))}, b: {list(range(100))}}}}}\n"
            "slurm: {sbatch: {hold: true}}\n"
            'command: {run: [echo, "{{ params.a }}", "{{ params.b }}"]}\n'
        )
        own, bare, ratio = paired(mine, theirs, rounds)
        yield Row(
            f"submitting {cells:,} cells to Slurm, against submitit's `map_array`",
            f"{own:.2f} s, {bare:.2f} s: {ratio:.2f}x",
            wanted,
        )
    root = str(folder / "queued")
    seconds([*sweep, root], recipe)
    status = [PYTHON, "-m", "hpcml", "status", "--root", root]
    taken = statistics.median(seconds(status, folder) for _ in range(5))
    remove_jobs()
    yield Row("`status` of 10,000 cells queued in Slurm", f"{taken:.2f} s", "below 1.5 s")
    yield Row("submitting 1,000 cells to Slurm with hydra's submitit launcher", hydra(folder), "")


def remove_jobs() -> None:
    """Take the jobs of the measurement out of the queue."""
    subprocess.run(["scancel", "--name=hpcml-bench"], check=True)


def hydra(folder: Path) -> str:
    """The time that hydra's launcher takes, once, or why that cannot be told."""
    bin = folder / "hydra" / "bin"
    try:
        seconds([sys.executable, "-m", "venv", str(bin.parent)], folder)
        packages = ["hydra-core", "hydra-submitit-launcher"]
        seconds([str(bin / "python"), "-m", "pip", "install", "--quiet", *packages], folder)
    except subprocess.CalledProcessError as error:
        words = error.stderr.decode().strip().splitlines() or [str(error)]
        return f"not measured, it cannot be installed: {words[-1]}"
    done = folder / "done"
    (bin / "sbatch").write_text(SBATCH.format(sbatch=shutil.which("sbatch"), done=done))
    (bin / "sbatch").chmod(0o755)
    (folder / "application.py").write_text(HYDRA)
    command = [
        *(str(bin / "python"), "application.py", "--multirun", "+a=range(10)", "+b=range(100)"),
        *("hydra/launcher=submitit_slurm", "hydra.launcher.name=hpcml-bench"),
        *("hydra.launcher.timeout_min=1", "hydra.launcher.array_parallelism=50"),
        "+hydra.launcher.additional_parameters.hold=true",
    ]
    environment = {**ENVIRONMENT, "PATH": f"{bin}:{os.environ['PATH']}"}
    begun = time.perf_counter()
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        while not done.exists() and process.poll() is None:
            time.sleep(0.01)
        taken = time.perf_counter() - begun
        process.kill()
    remove_jobs()
    return f"{taken:.1f} s (once)" if done.exists() else "not measured: hydra failed"


BARE_SCRIPT = """#!/bin/bash
#SBATCH --job-name=hpcml-bench --time=1 --output=bare.%a
date +%s.%N
exec date +%s.%N
"""


def start(folder: Path) -> Iterator[Row]:
    """From the first line of a batch script to that of its program, one task after the other."""
    tasks = 15
    # The nodes of `make slurm` have a /tmp of their own.
    places = (folder, REPOSITORY, sys.prefix, sys.base_prefix)
    subprocess.run([CLUSTER, "share", *places], check=False, capture_output=True)
    recipe = folder / "start"
    recipe.mkdir()
    (recipe / "site.yaml").write_text(f"{SITE}setup: [date +%s.%N]\n")
    (recipe / "start.yaml").write_text(
        "name: hpcml-bench\nkind: command\nresources: {time: 1m}\narray: {max_running: 1}\n"
        f"sweep: {{grid: {{n: {list(range(tasks))}}}}}\ncommand: {{run: [date, '+%s.%N']}}\n"
    )
    (recipe / "bare.sh").write_text(BARE_SCRIPT)
    sweep = [PYTHON, "-m", "hpcml", "sweep", "start.yaml", "--site", "site.yaml", "--wait"]
    seconds(sweep, recipe)
    seconds(["sbatch", "--wait", f"--array=0-{tasks - 1}%1", "bare.sh"], recipe)
    begun = sorted(float(path.read_text()) for path in recipe.glob("runs/*/*/tasks/*.out"))
    first = sorted(float(path.read_text()) for path in recipe.glob("runs/*/*/cells/*/log.1.out"))
    bare = [
        float(last) - float(before)
        for before, last in (path.read_text().split() for path in recipe.glob("bare.*[0-9]"))
    ]
    assert len(begun) == len(first) == len(bare) == tasks
    own, plain = statistics.median(map(operator.sub, first, begun)), statistics.median(bare)
    yield Row(
        "from the start of a batch script to its program's first line, against a bare script",
        f"{own:.2f} s, {plain:.3f} s: {own - plain:.2f} s more",
        "at most 0.3 s more",
    )


def megatron(folder: Path) -> Iterator[Row]:
    """The engine megatron against a bare loop over megatron-core, in as many processes."""
    data = folder / "runs" / ".data"

    def run(what: str, processes: int) -> dict[str, float]:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = str(server.getsockname()[1])
        ranks = []
        for rank in range(processes):
            several = {
                "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
            }  # fmt: skip
            script = str(REPOSITORY / "tests" / "bench_megatron.py")
            ranks.append(
                subprocess.Popen(
                    [PYTHON, script, what, str(data), str(processes), str(time.time())],
                    cwd=folder,
                    env={**ENVIRONMENT, **(several if processes > 1 else {})},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            )
        outputs = [process.communicate()[0] for process in ranks]
        found: dict[str, float] = json.loads(outputs[0].splitlines()[-1])
        return found

    def compared(name: str, processes: int, rounds: int) -> tuple[float, float, float]:
        pairs = [(run("mine", processes), run("bare", processes)) for _ in range(rounds)]
        own, plain = ([pair[side][name] for pair in pairs] for side in (0, 1))
        ratios = [mine / bare for mine, bare in zip(own, plain, strict=True)]
        return statistics.median(own), statistics.median(plain), statistics.median(ratios)

    # Two processes on two cores wait for each other whenever the machine does anything else.
    for processes, rounds in ((1, 5), (2, 11)):
        own, bare, ratio = compared("step", processes, rounds)
        where = "in one process" if processes == 1 else "of two tensor-parallel processes"
        yield Row(
            f"a step of megatron {where}, against a bare loop's",
            f"{own * 1e3:.1f} ms, {bare * 1e3:.1f} ms: {ratio:.3f}x",
            "at most 1.02x",
        )
    own, bare, ratio = compared("started", 1, 3)
    yield Row(
        "from the start of megatron to its first step, against a bare loop's",
        f"{own:.1f} s, {bare:.1f} s: {ratio:.2f}x",
        "at most 1.1x",
    )
    found = run("mine", 1)
    yield Row(
        "part of a step of megatron that reading the data takes",
        f"{found['reading'] / found['step']:.2%}",
        "printed only",
    )
    found = run("save", 1)
    yield Row(
        "a checkpoint of megatron in the background holds up, against one that is waited for",
        f"{found['held']:.2f} s, {found['whole']:.2f} s: {found['held'] / found['whole']:.1%}",
        "below 10%",
    )


def main() -> None:
    """Run everything and print the table."""
    print(
        f"{datetime.now(timezone.utc):%Y-%m-%d}, {platform.machine()}, {os.cpu_count()} cores, "
        f"Python {platform.python_version()}\n\n| what | measured | wanted |\n|---|---|---|"
    )
    parts: list[Callable[[Path], Iterator[Row]]] = [command_line, overhead, training, loading]
    if VLLM_PYTHON.exists():
        parts.append(inference)
    if shutil.which("sinfo") and not subprocess.run(["sinfo"], capture_output=True).returncode:
        parts += [slurm, start]
    if importlib.util.find_spec("megatron"):
        parts.append(megatron)
    with tempfile.TemporaryDirectory(prefix="hpcml-bench-") as name:
        for part in parts:
            for row in part(Path(name)):
                print(f"| {row.what} | {row.measured} | {row.wanted} |", flush=True)


if __name__ == "__main__":
    main()
