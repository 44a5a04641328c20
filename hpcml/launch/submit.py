"""One submission: from the cells that are left to jobs of the scheduler."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path

from hpcml.launch.local import LocalExecutor
from hpcml.plan import Plan, Submission, take_snapshot
from hpcml.plan.resources import gpus, slots
from hpcml.render import render_script
from hpcml.runs import disk
from hpcml.runs.folder import RunFolder, now
from hpcml.worker.task import run_task


def create_run(plan: Plan) -> RunFolder:
    """The run folder of ``plan``: a new one, or the one that the same cells have already.

    Raises:
        UserError: the runs root cannot be written; nothing half-made is left there.
    """
    run = RunFolder.create(
        plan.root,
        plan.name,
        plan.run_id,
        plan.document(),
        plan.recipe_text,
        plan.site_text,
        (
            {"index": cell.index, "id": cell.id, "params": cell.params, "payload": cell.payload}
            for cell in plan.cells
        ),
    )
    if run.plan != plan.document():
        # The same cells on other resources, or ranked by another metric.
        with disk.plain_errors(f"write {run.plan_file}"):
            text = json.dumps(plan.document(), indent=2, ensure_ascii=False) + "\n"
            disk.replace(run.plan_file, text.encode())
        run = RunFolder.open(run.path)
    return run


def next_submission(plan: Plan) -> Submission:
    """What giving ``plan`` to the scheduler now would submit: every cell that is not done."""
    number, indices = 1, list(range(len(plan.cells)))
    if (plan.folder / "plan.json").exists():
        run = RunFolder.open(plan.folder, plan.digest)
        number = run.next_submission()
        done = run.done()
        indices = [index for cell_id, index in run.ids.items() if cell_id not in done]
    return Submission(plan, number, tuple(indices), take_snapshot(plan))


def submit(submission: Submission, run: RunFolder) -> LocalExecutor:
    """Submit all tasks of a submission as one array.

    The journal says ``submitting`` before the scheduler is called and ``submitted`` after, so
    that a kill in between is seen by whoever looks.

    Returns:
        The executor; for the local site, its ``poll`` runs the tasks.

    Raises:
        UserError: the script cannot be rendered, or the run folder cannot be written.
    """
    with disk.plain_errors(f"copy the code to {run.code}"):
        run.code.mkdir(exist_ok=True)
        submission.snapshot.write(run.code)
    # The number is taken when the record is there: another command may have been faster.
    number = run.write_submission({"created": now(), **submission.record()})
    submission = replace(submission, number=number)
    script = run.scripts / f"{number:03}.sh"
    with disk.plain_errors(f"write {script}"):
        disk.replace(script, render_script(submission).encode())
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
    executor = LocalExecutor(run.scripts)
    executor.update_parameters(
        script=str(script),
        log=str(run.tasks / f"{submission.number:03}"),
        slots=at_a_time(plan),
        gpus=gpus(plan.site) if plan.resources.gpus else [],
        gpus_per_task=plan.resources.gpus * plan.pack,
        time=plan.resources.time,
        lead=plan.lead,
        signum=int(signal.Signals[f"SIG{plan.site.signal.name}"]),
    )
    return executor


def at_a_time(plan: Plan) -> int:
    """How many tasks of ``plan`` a local site runs side by side."""
    fit = slots(plan.resources, plan.pack, plan.site)
    return min(fit, plan.max_running or fit)
