"""A large inference, killed, taken away and cancelled, against one that nobody disturbed.

Run it on a test cluster (``make slurm``); it takes some ten minutes of two cores. A tiny random
model answers 50,000 rows by 8 workers. Fifty times something of a worker gets SIGKILL: its engine,
its payload or hpcml's own worker. One node is set down under what runs there, and once the whole
run is cancelled and given again. Then the output must be the same as that of a run on this machine,
row by row. The argument is the seed of what is killed and when.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPOSITORY))

import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from tests.conftest import kill, of_folder  # noqa: E402
from tests.infer_models import make_model, questions  # noqa: E402

ROWS, WORKERS, KILLS = 50_000, 8, 50
NODE_AT, CANCEL_AT = 15, 30  # so many kills before
# By their command lines; with hpcml's own worker its job is over, and somebody has to give the
# command again when none is left.
ENGINE, PAYLOAD, WORKER = "hpcml.infer.process", "hpcml.infer", "hpcml.worker"
VICTIMS = (ENGINE, ENGINE, PAYLOAD, PAYLOAD, WORKER)
LIMIT = 45 * 60.0
SITE = "name: cluster\nscheduler: slurm\nsignal: {name: USR1, lead: 30s}\n"
MUST_EQUAL = ("key", "answer", "finish_reason", "prompt_tokens", "output_tokens", "fingerprint")


class Run:
    """One inference in a folder of its own.

    Args:
        folder: seen by the nodes.
        model: the model's folder.
        workers: how many share it.
        site: ``local`` or ``cluster``.
    """

    def __init__(self, folder: Path, model: Path, workers: int, site: str) -> None:
        self.folder = folder
        self._site = site
        # With so much memory two workers have room on a node.
        (folder / "site_configs").mkdir(parents=True)
        (folder / "site_configs" / "cluster.yaml").write_text(SITE)
        keys = [f"key{number}" for number in range(ROWS)]
        table = pa.table({"id": keys, "question": questions(ROWS)})
        pq.write_table(table, folder / "in.parquet")
        recipe = {
            "name": "kills",
            "kind": "infer",
            "params": {"temperature": 0, "max_tokens": 16},
            "resources": {"time": "1h", **({"memory": "120G"} if site == "cluster" else {})},
            "retry": {"killed": 2 * KILLS, "application": 2 * KILLS},
            "infer": {
                "model": str(model),
                "input": {"files": "in.parquet", "key": "id"},
                "prompt": "{{ question }}",
                "engine_args": {"dtype": "float32"},
                "workers": workers,
            },
        }
        (folder / "kills.yaml").write_text(json.dumps(recipe))

    def hpcml(self, *arguments: str) -> None:
        """Call the command; its output is shown if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "hpcml", *arguments],
            cwd=self.folder,
            env={**os.environ, "PYTHONPATH": str(REPOSITORY), "HPCML_SITE": self._site},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            sys.exit(f"hpcml {arguments}: exit code {done.returncode}\n{done.stdout}{done.stderr}")

    def infer(self) -> None:
        """Submit what is left, or here do it."""
        self.hpcml("infer", "--batch", "kills.yaml")

    @property
    def cell(self) -> Path:
        """The folder of the only cell."""
        (plan,) = self.folder.glob("runs/*/*/plan.json")
        (cell,) = (plan.parent / "cells").iterdir()
        return cell

    def parts(self) -> tuple[int, int]:
        """How many shards are done, and how many there are; 0 before the plan is made."""
        plan = next(self.folder.glob("runs/*/*/cells/*/rounds/1/plan/plan.json"), None)
        shards = json.loads(plan.read_text())["shards"] if plan else 0
        return len(list(self.folder.glob("runs/*/*/cells/*/rounds/1/parts/*.arrow"))), shards

    def output(self) -> pa.Table:
        """The answers, as far as they must not depend on what happened."""
        return pq.read_table(self.cell / "output.parquet", columns=list(MUST_EQUAL))


def slurm(*command: str) -> str:
    """What a command of Slurm prints."""
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def queue(run: Run) -> list[list[str]]:
    """Of each task that is queued or runs: its number, its node, and why it waits."""
    (journal,) = run.folder.glob("runs/*/*/submissions.jsonl")
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    jobs = {str(entry["job"]) for entry in entries if entry["event"] == "submitted"}
    lines = [line.split("|") for line in slurm("squeue", "-hro", "%i|%N|%r").splitlines()]
    return [line for line in lines if line[0].partition("_")[0] in jobs]


def disturb(run: Run, seed: int) -> Counter[str]:
    """Kill, take away and cancel until the run is done; how often what was done."""
    chooser = random.Random(seed)
    done: Counter[str] = Counter()
    down = ""
    end = time.monotonic() + LIMIT
    run.infer()
    while not any(run.folder.glob("runs/*/*/cells/*/merge.json")):
        if time.monotonic() > end:
            sys.exit(f"not done after {LIMIT / 60:.0f} min: {dict(done)}, {run.parts()} shards")
        time.sleep(chooser.uniform(0.2, 2.5))
        tasks = queue(run)
        if not tasks:
            run.infer()
            done["command given again, since no job was left"] += 1
        for job, _, reason in tasks:
            # Slurm holds a job that came back to a node which had not got rid of it yet.
            if "held" in reason.lower():
                slurm("scontrol", "release", job)
                done["held by Slurm, released"] += 1
        # Not much faster than the work goes on.
        parts, shards = run.parts()
        if done["SIGKILL"] >= min(KILLS, 1.5 * KILLS * parts / max(shards, 1)):
            continue
        word = chooser.choice(VICTIMS)
        if victims := of_folder(run.folder, word):
            kill(chooser.choice(victims))
            done["SIGKILL"] += 1
            done[f"SIGKILL to {word}"] += 1
        print(f"{time.strftime('%H:%M:%S')} {done['SIGKILL']} kills, {parts} of {shards} shards",
              file=sys.stderr, flush=True)  # fmt: skip
        if done["SIGKILL"] == NODE_AT and not down:
            down = chooser.choice([node for _, node, _ in tasks if node])
            slurm("scontrol", "update", f"nodename={down}", "state=down", "reason=kills")
            done["node down"] += 1
        if done["SIGKILL"] == CANCEL_AT and not done["cancelled"]:
            run.hpcml("cancel", "kills", "0")
            while queue(run):
                time.sleep(1)
            done["cancelled"] += 1
            slurm("scontrol", "update", f"nodename={down}", "state=resume")
            run.infer()
    while queue(run):
        time.sleep(1)
    return done


def told(run: Run) -> Counter[str]:
    """What the run's own files say about how it went."""
    found: Counter[str] = Counter()
    for events in run.cell.glob("workers/*/events.jsonl"):
        for event in map(json.loads, events.read_text().splitlines()):
            if event["event"] == "started":
                found["attempts of workers"] += 1
    for log in run.cell.glob("workers/*/log.*.out"):
        found["engines that died"] += log.read_text().count("the engine died")
    claims = Counter(path.name.partition(".")[0] for path in run.cell.glob("rounds/1/claims/*"))
    found["pieces claimed more than once"] = sum(count > 1 for count in claims.values())
    for job in {line[0] for line in accounted(run)}:
        found["requeues"] += sum(line[0] == job for line in accounted(run)) - 1
    return found


def accounted(run: Run) -> list[list[str]]:
    """All starts of all tasks, as the accounting has them."""
    (journal,) = run.folder.glob("runs/*/*/submissions.jsonl")
    entries = [json.loads(line) for line in journal.read_text().splitlines()]
    jobs = [str(entry["job"]) for entry in entries if entry["event"] == "submitted"]
    text = slurm("sacct", "-DXnP", "-j", ",".join(jobs), "-o", "JobID,State")
    return [line.split("|") for line in text.splitlines()]


def compare(disturbed: Run, undisturbed: Run) -> list[str]:
    """What is wrong with the disturbed run."""
    proof: dict[str, Any] = json.loads((disturbed.cell / "merge.json").read_text())
    wrong = [
        f"{name} is {proof[name]}"
        for name, right in {"rows_in": ROWS, "rows_out": ROWS, "duplicates": 0, "failed": 0}.items()
        if proof[name] != right
    ]
    mine, theirs = disturbed.output(), undisturbed.output()
    if mine["key"].to_pylist() != [f"key{number}" for number in range(ROWS)]:
        wrong.append("its keys are not those of the input")
    different = sum(a != b for a, b in itertools.zip_longest(mine.to_pylist(), theirs.to_pylist()))
    return [*wrong, f"{different} rows differ"] if different else wrong


def main() -> int:
    """Print what happened, and whether the outputs are the same."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        folder = Path(temporary)
        model = make_model(folder / "model")
        disturbed = Run(folder / "disturbed", model, WORKERS, "cluster")
        begun = time.monotonic()
        try:
            done = disturb(disturbed, seed)
        finally:
            slurm("scancel", "--quiet", "-n", "kills")
        print(f"disturbed: {time.monotonic() - begun:.0f} s, by {WORKERS} workers")
        for what, times in [*done.items(), *told(disturbed).items()]:
            print(f"  {what}: {times}")
        undisturbed = Run(folder / "undisturbed", model, 2, "local")
        begun = time.monotonic()
        undisturbed.infer()
        print(f"undisturbed: {time.monotonic() - begun:.0f} s, by 2 workers on this machine")
        wrong = compare(disturbed, undisturbed)
        if done["SIGKILL"] < KILLS:
            wrong.append(f"it was done after {done['SIGKILL']} kills")
        print("\n".join(wrong) or f"{ROWS:,} rows, each once, the same as undisturbed")
        return len(wrong)


if __name__ == "__main__":
    sys.exit(main())
