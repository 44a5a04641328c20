"""One submission: from the cells that are left to jobs of the scheduler."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from pathlib import Path

from hpcml.launch.local import LocalExecutor
from hpcml.plan import Plan, Submission, take_snapshot
from hpcml.plan.resources import gpus, slots
from hpcml.render import render_script
from hpcml.runs.disk import plain_errors, replace
from hpcml.runs.folder import RunFolder, now
from hpcml.worker.task import run_task


def preview(plan: Plan, indices: Sequence[int], number: int = 1) -> str:
    """The script that :func:`submit` would hand to the scheduler, byte for byte."""
    return render_script(Submission(plan, number, tuple(indices), take_snapshot(plan)))


def submit(plan: Plan, run: RunFolder, indices: Sequence[int]) -> LocalExecutor:
    """Submit the cells ``indices`` of ``run`` as one array of tasks.

    The journal says ``submitting`` before the scheduler is called and ``submitted`` after, so
    that a kill in between is seen by whoever looks.

    Returns:
        The executor; for the local site, its ``poll`` runs the tasks.

    Raises:
        UserError: the script cannot be rendered, or the run folder cannot be written.
    """
    snapshot = take_snapshot(plan)
    with plain_errors(f"copy the code to {run.code}"):
        run.code.mkdir(exist_ok=True)
        snapshot.write(run.code)
    record = Submission(plan, 0, tuple(indices), snapshot).record()
    number = run.write_submission({"created": now(), **record})
    submission = Submission(plan, number, tuple(indices), snapshot)
    script = run.scripts / f"{number:03}.sh"
    with plain_errors(f"write {script}"):
        replace(script, render_script(submission).encode())
    run.journal("submitting", submission=number, tasks=submission.tasks)
    executor = _local_executor(submission, run, script)
    jobs = executor.map_array(
        run_task,
        [str(run.path)] * submission.tasks,
        [number] * submission.tasks,
        range(submission.tasks),
    )
    run.journal("submitted", submission=number, jobs=[jobs[0].job_id, jobs[-1].job_id])
    return executor


def _local_executor(submission: Submission, run: RunFolder, script: Path) -> LocalExecutor:
    plan = submission.plan
    at_a_time = slots(plan.resources, plan.pack, plan.site)
    executor = LocalExecutor(run.scripts)
    executor.update_parameters(
        script=str(script),
        # Braces in the path itself must survive the formatting.
        log=str(run.tasks / f"{submission.number:03}.").replace("{", "{{").replace("}", "}}")
        + "{task}.{stream}",
        slots=min(at_a_time, plan.max_running or at_a_time),
        gpus=gpus(plan.site) if plan.resources.gpus else [],
        gpus_per_task=plan.resources.gpus * plan.pack,
        time=plan.resources.time,
        lead=plan.lead,
        signum=int(signal.Signals[f"SIG{plan.site.signal.name}"]),
    )
    return executor
