"""How long a training takes on a busy cluster: in one piece, in segments, or in what is free.

Run it on an idle test cluster (``make slurm``). It takes up to an hour, and hardly any of
the machine. Jobs of a made-up mix keep the eight nodes busy, with a queue in front of them.
Then four runs are submitted at the same moment. Each needs ten minutes of one whole node. The
program only waits, so that they can run beside each other on a small machine: what is measured is
the queue.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import yaml

SITE = Path(__file__).resolve().parents[1] / "site_configs/devcluster.yaml"
STEPS = 600  # of one second each
WARM_UP = 240.0  # seconds until the cluster is full and has a queue
QUEUED = 12  # jobs of the others that wait at any time
LIMIT = 2 * 3600.0

# It saves when it is asked to, and every minute, as a training does.
PROGRAM = f"""
import os, pathlib, signal, sys, time
import hpcml

saved = pathlib.Path(os.environ["HPCML_CHECKPOINTS"], "step")
saved.parent.mkdir(exist_ok=True)
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
step = int(saved.read_text()) if saved.exists() else 0
while step < {STEPS} and not asked:
    time.sleep(1)
    step += 1
    if step % 60 == 0 or asked:
        new = saved.with_suffix(".new")
        new.write_text(str(step))
        new.replace(saved)
    hpcml.report(step=step, total_steps={STEPS})
if step < {STEPS}:
    new = saved.with_suffix(".new")
    new.write_text(str(step))
    new.replace(saved)
    sys.exit(75)
"""

RECIPE = """
name: {name}
kind: command
command: {{run: [python3, program.py]}}
resources: {{cpus: 64, gpus: 8, processes: 1, time: {time}}}
slurm: {{partition: gpu{more}}}
"""

#: Time limit, further options of Slurm, and how the job comes back.
VARIANTS: Mapping[str, tuple[str, str, str]] = {
    "one job of 12 minutes": ("12m", "", "requeue"),
    "segments of 3 minutes, each requeued when it ends": ("3m", "", "requeue"),
    "segments of 3 minutes, all submitted at the beginning": ("3m", "", "chain"),
    "12 minutes, or what is free from 3 on (`time_min`)": ("12m", ", time_min: 3m", "requeue"),
}


@dataclass(frozen=True)
class Outcome:
    """How a run went: seconds from submission to the end, of them in jobs, and how many jobs."""

    took: float
    running: float
    jobs: int


class OtherJobs:
    """The other users: always some jobs waiting, of which each asks for whole nodes.

    Large ones make the gaps: nodes stay empty while they wait for the others.
    """

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def fill(self) -> None:
        """Submit jobs until enough of them wait."""
        waiting = subprocess.run(
            ["squeue", "-h", "-n", "other", "-t", "PENDING", "-o", "%i"],
            check=True, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        for _ in range(QUEUED - len(waiting)):
            minutes = self._random.randint(2, 10)
            nodes = self._random.choice([1, 1, 1, 2, 2, 4, 6, 8])
            seconds = int(minutes * 60 * self._random.uniform(0.4, 1.0))
            subprocess.run(
                ["sbatch", "-J", "other", "-p", "gpu", f"-N{nodes}", "--exclusive",
                 f"-t{minutes}", "-o", "/dev/null", "--wrap", f"sleep {seconds}"],
                check=True, capture_output=True,
            )  # fmt: skip


def submit(folder: Path, number: int, time_limit: str, more: str, coming_back: str) -> None:
    """Submit one of the runs and leave it to the scheduler."""
    recipe = folder / f"variant-{number}.yaml"
    recipe.write_text(RECIPE.format(name=f"variant-{number}", time=time_limit, more=more))
    site = yaml.safe_load(SITE.read_text())
    site["slurm"].update(coming_back=coming_back, links=8)
    (folder / f"{coming_back}.yaml").write_text(yaml.safe_dump(site))
    subprocess.run(
        [sys.executable, "-m", "hpcml", "sweep", str(recipe), "--site", f"{coming_back}.yaml"],
        cwd=folder, check=True, capture_output=True,
    )  # fmt: skip


def outcome(events: Path, submitted: float) -> Outcome | None:
    """How a run went, when it is done."""
    if not events.exists():
        return None
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    if not lines or lines[-1].get("cause") != "done":
        return None
    began, running, jobs, end = 0.0, 0.0, 0, 0.0
    for line in lines:
        moment = datetime.fromisoformat(line["time"]).timestamp()
        if line["event"] == "started":
            began, jobs = moment, jobs + 1
        elif line["event"] == "ended":
            running, end = running + moment - began, moment
    return Outcome(end - submitted, running, jobs)


def main() -> int:
    """Print the table; the argument is the seed of the other users."""
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    others = OtherJobs(seed)
    runs = Path("/var/tmp/hpcml-runs")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as temporary:
        folder = Path(temporary)
        (folder / "program.py").write_text(PROGRAM)
        for old in runs.glob("variant-*"):
            subprocess.run(["rm", "-rf", str(old)], check=True)
        begun = time.time()
        while time.time() - begun < WARM_UP:
            others.fill()
            time.sleep(5)
        submitted = time.time()
        for number, how in enumerate(VARIANTS.values()):
            submit(folder, number, *how)
        found: dict[int, Outcome] = {}
        try:
            while len(found) < len(VARIANTS) and time.time() - submitted < LIMIT:
                others.fill()
                for number in range(len(VARIANTS)):
                    for events in runs.glob(f"variant-{number}/*/cells/*/events.jsonl"):
                        done = outcome(events, submitted)
                        if done is not None and number not in found:
                            found[number] = done
                            print(number, done, file=sys.stderr, flush=True)
                time.sleep(5)
        finally:
            subprocess.run(["scancel", "-n", "other"], check=True)
    print("| asked for | done after | in jobs | jobs |\n|---|---|---|---|")
    for number, what in enumerate(VARIANTS):
        if number in found:
            result = found[number]
            print(f"| {what} | {result.took / 60:.1f} min | {result.running / 60:.1f} min "
                  f"| {result.jobs} |")  # fmt: skip
        else:
            print(f"| {what} | not within {LIMIT / 60:.0f} min | | |")
    return len(found) != len(VARIANTS)


if __name__ == "__main__":
    sys.exit(main())
