"""One submission: from the cells that are left to jobs of the scheduler."""

from __future__ import annotations

import getpass
import json
import os
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hpcml.errors import UserError
from hpcml.files import is_dir, is_file, plain_errors
from hpcml.launch.cluster import SchedulerError
from hpcml.launch.executor import Scheduler, ScriptExecutor
from hpcml.launch.journal import read_journal
from hpcml.launch.local import LocalScheduler
from hpcml.launch.slurm.client import SlurmError
from hpcml.launch.slurm.journal import clusters, of_slurm, settled
from hpcml.launch.slurm.query import queue
from hpcml.launch.slurm.scheduler import SlurmScheduler, wait_for
from hpcml.launch.slurm.states import SlurmWatcher
from hpcml.launch.volcano.client import Cluster
from hpcml.launch.volcano.journal import labels, of_volcano
from hpcml.launch.volcano.journal import settled as settled_on_volcano
from hpcml.launch.volcano.scheduler import VolcanoScheduler
from hpcml.launch.watch import watchers
from hpcml.plan import Plan, Snapshot, Submission, take_snapshot
from hpcml.plan.resources import gpus, slots
from hpcml.plan.volcano import Job, mark_of
from hpcml.render import RUN_LABEL, parse_job, render_job, render_script
from hpcml.runs import disk
from hpcml.runs.folder import RunFolder, now
from hpcml.worker.chain import NotOver
from hpcml.worker.halving import choose, result_path
from hpcml.worker.rounds import propose
from hpcml.worker.task import run_task


def create_run(plan: Plan) -> RunFolder:
    """The run folder of ``plan``: a new one, or the one that the same cells have already.

    Raises:
        UserError: the runs root cannot be written; nothing half-made is left there.
    """
    return RunFolder.create(
        plan.root,
        plan.name,
        plan.run_id,
        plan.document(),
        plan.recipe_text,
        plan.site_text,
        ((cell.id, cell.members) for cell in plan.cells),
    )


def renew_plan(plan: Plan, run: RunFolder) -> RunFolder:
    """The run with ``plan`` as its plan: the same cells on other resources, or ranked otherwise.

    For whoever is the run's only driver: the cells that run now go by the old one.

    Raises:
        UserError: the run folder cannot be written.
    """
    if run.plan == plan.document():
        return run
    with plain_errors(f"write {run.plan_file}"):
        text = json.dumps(plan.document(), indent=2, ensure_ascii=False) + "\n"
        disk.replace(run.plan_file, text.encode())
    return RunFolder.open(run.path)


def next_submission(plan: Plan, snapshot: Snapshot | None = None) -> Submission:
    """What giving ``plan`` to the scheduler now would submit: every cell that is not done.

    Args:
        plan: the cells.
        snapshot: the code that they run; by default that of now.
    """
    number, indices = 1, list(range(len(plan.cells)))
    if is_file(plan.folder / "plan.json"):
        run = RunFolder.open(plan.folder, plan.digest)
        number = run.next_submission()
        # In this order: what leaves the queue meanwhile is done, or does not run any more.
        given = taken(run)
        given |= {run.ids[cell_id] for cell_id in run.done()}
        indices = [index for index in indices if index not in given]
    return Submission(plan, number, tuple(indices), snapshot or take_snapshot(plan))


def next_submissions(plan: Plan, snapshot: Snapshot | None = None) -> list[Submission]:
    """What giving ``plan`` to the scheduler now would submit: one submission, but for a chain.

    A halving has one for each rung that is left, a search one for each round. While jobs of it are
    queued it has none: the later ones among them would take what is given now for lost.
    """
    if not plan.chain:
        return [next_submission(plan, snapshot)]
    snapshot = snapshot or take_snapshot(plan)
    number, first, left = 1, 1, _all_of(plan, 1)
    if is_file(plan.folder / "plan.json"):
        run = RunFolder.open(plan.folder, plan.digest)
        number = run.next_submission()
        if _in_queue(run):
            return [Submission(plan, number, (), snapshot, rung=1)]
        first = max(decided(run), default=1)
        left = _left_of(plan, run, first)
    if not left and first < len(plan.chain):
        first, left = first + 1, _all_of(plan, first + 1)
    found = [Submission(plan, number, tuple(left), snapshot, rung=first)]
    for rung in range(first + 1, len(plan.chain) + 1):
        cells = tuple(_all_of(plan, rung))
        found.append(Submission(plan, number + rung - first, cells, snapshot, rung=rung))
    return found


def _all_of(plan: Plan, rung: int) -> list[int]:
    """The places of a rung, or the cells of a round."""
    begin = 0 if plan.search is None else sum(plan.chain[: rung - 1])
    return list(range(begin, begin + plan.chain[rung - 1]))


def _left_of(plan: Plan, run: RunFolder, rung: int) -> list[int]:
    """What of a rung has no result: places; or cells, of this round and of those before."""
    if plan.search is not None:
        done = {run.ids[cell_id] for cell_id in run.done()}
        return [index for index in range(sum(plan.chain[:rung])) if index not in done]
    cells = run.choices().get(rung, _all_of(plan, rung))
    return [place for place, index in enumerate(cells) if not is_file(_result(plan, index, rung))]


def decided(run: RunFolder) -> set[int]:
    """The rungs, or the rounds, of which it is decided what they run."""
    return {*run.choices(), *run.proposals()}


def begin_rung(submission: Submission, run: RunFolder, since: str | None = None) -> Submission:
    """Decide which cells have the places of a later rung, or what the cells of a round try.

    Args:
        submission: the rung or round.
        run: where the cells lie.
        since: when the command began that submits one rung after another.

    Returns:
        The submission, in which only those places are left that have a cell.

    Raises:
        NotOver: the one before is not over.
    """
    if submission.rung is None or not submission.indices:
        return submission
    decide(submission.plan, run, submission.rung, since)
    cells = run.choices().get(submission.rung)
    if cells is None:
        return submission
    return replace(submission, indices=tuple(p for p in submission.indices if p < len(cells)))


def begin_next_rung(plan: Plan, run: RunFolder) -> None:
    """Decide the next rung or round, if the one before is over."""
    with suppress(NotOver):
        for rung in range(1, len(plan.chain) + 1):
            decide(plan, run, rung)


def decide(plan: Plan, run: RunFolder, rung: int, since: str | None = None) -> None:
    """Decide what a rung or a round runs, unless that is decided.

    Raises:
        NotOver: the one before is not over.
    """
    if plan.search is not None:
        propose(str(run.path), rung)
    elif rung > 1:
        choose(str(run.path), rung, since)


def _result(plan: Plan, index: int, rung: int) -> Path:
    return Path(result_path(str(plan.folder), plan.cells[index].id, plan.halving, rung))


def _in_queue(run: RunFolder) -> bool:
    """Whether a scheduler has anything of a run.

    Raises:
        UserError: the scheduler does not answer.
    """
    for watcher in watchers(run):
        watcher.ask()
        if watcher.trouble:
            raise _unknown(watcher.trouble)
        if watcher.in_queue():
            return True
    return False


def resubmission(plan: Plan, run: RunFolder, indices: Sequence[int]) -> Submission:
    """A submission of some cells, in the code of the newest submission.

    Raises:
        UserError: that code is not there any more, or the environment lacks a variable.
    """
    missing = [name for name in plan.env_from if name not in os.environ]
    if missing and plan.site.scheduler != "volcano":
        raise UserError(
            f"{', '.join(missing)} not set in this environment, which the recipe takes from it "
            "(env_from); export it before the command"
        )
    number = run.next_submission()
    code = run.read_submission(number - 1)["code"] if number > 1 else None
    if code is None or not is_dir(run.path / code):
        raise UserError(f"{run.path} has no copy of its code; give the command that made it again")
    snapshot = Snapshot((), code.rpartition("/")[2])
    return Submission(plan, number, tuple(sorted(indices)), snapshot)


def taken(run: RunFolder) -> set[int]:
    """Cells that a scheduler has already.

    Raises:
        UserError: the scheduler does not answer, so that cells could be submitted twice.
    """
    found: set[int] = set()
    for watcher in watchers(run):
        watcher.ask()
        if watcher.trouble:
            raise _unknown(watcher.trouble)
        found |= watcher.taken(watcher.refresh())
    return found


def more_workers(plan: Plan, run: RunFolder, count: int) -> Submission:
    """A submission of ``count`` more workers for each cell that is not done."""
    number = run.next_submission()
    records = [run.read_submission(earlier) for earlier in range(1, number)]
    first = max((record["first_worker"] + record["workers"] for record in records), default=0)
    done = run.done()
    indices = tuple(index for cell_id, index in run.ids.items() if cell_id not in done)
    return Submission(replace(plan, workers=count), number, indices, take_snapshot(plan), first)


def settle(run: RunFolder) -> list[str]:
    """Record what became of calls of a scheduler that were cut off; call it as the only driver.

    Returns:
        Jobs that were submitted and that the journal did not know.

    Raises:
        UserError: the scheduler does not answer.
    """
    entries = read_journal(run)
    found = []
    try:
        if of_slurm(entries):
            found += settled(run, entries, queue(getpass.getuser(), clusters(run, entries)))
        if of_volcano(entries):
            cluster = Cluster(run.plan["site"]["volcano"])
            jobs = [job for label in labels(entries) for job in cluster.jobs(label)]
            by_name = {job["metadata"]["name"]: job for job in jobs}
            found += settled_on_volcano(run, entries, by_name)
    except SchedulerError as error:
        raise _unknown(str(error)) from None
    for entry in found:
        run.journal(**entry)
    return [str(entry["job"]) for entry in found if entry["event"] == "submitted"]


def release(run: RunFolder) -> list[str]:
    """Let jobs of the run go on that nodes could not start; returns what to say of it.

    Raises:
        UserError: the scheduler does not answer.
    """
    said = []
    for watcher in watchers(run):
        watcher.ask()
        if watcher.trouble:
            raise _unknown(watcher.trouble)
        said += watcher.release()
    return said


def _unknown(trouble: str) -> UserError:
    return UserError(f"nothing is submitted, since some of it may be queued already: {trouble}")


def _unfinished_jobs(plan: Plan) -> set[int]:
    """The jobs after which an earlier stage can be complete: none when its cells are done.

    Raises:
        UserError: cells are neither done nor in the queue, so that it never will be.
    """
    run = RunFolder.open(plan.folder, plan.digest)
    if not _left(run):
        return set()
    watcher = SlurmWatcher(run)
    watcher.ask()
    queued = watcher.in_queue()
    # The files once more: what left the queue in between is done, or will not be.
    left = _left(run)
    if watcher.trouble or left - queued:
        why = watcher.trouble or f"{len(left - queued)} of its cells are not queued"
        raise UserError(f"{plan.name} must succeed first: {why}")
    return watcher.last_jobs(left)


def _left(run: RunFolder) -> set[int]:
    done = run.done()
    return {index for cell_id, index in run.ids.items() if cell_id not in done}


def submit_here(submission: Submission, run: RunFolder) -> LocalScheduler:
    """Queue all tasks of a submission on this machine; whoever drives the scheduler runs them.

    Raises:
        UserError: the script cannot be rendered, or the run folder cannot be written.
    """
    submission, script = _prepare(submission, run)
    plan = submission.plan
    scheduler = LocalScheduler(
        run.path,
        script,
        log=run.tasks / f"{submission.number:03}",
        slots=at_a_time(plan),
        gpus=gpus(plan.site) if plan.resources.gpus else [],
        gpus_per_task=plan.resources.gpus * plan.pack,
        time=plan.resources.time,
        lead=plan.lead,
        signum=int(signal.Signals[f"SIG{plan.site.signal.name}"]),
    )
    run.journal("submitted", submission=submission.number, part=0, tasks=submission.tasks)
    _execute(submission, run, scheduler, range(submission.tasks))
    return scheduler


def submit_to_cluster(
    submission: Submission, run: RunFolder, lock: int, after: Sequence[str] = ()
) -> list[str]:
    """Submit all tasks of a submission to the site's cluster; returns the jobs.

    Args:
        submission: the cells.
        run: where they lie.
        lock: the descriptor of the driver's lock.
        after: with Slurm, jobs that must have ended before.

    Raises:
        UserError: they cannot be rendered or written, or are refused as a whole.
        PartlySubmitted: the scheduler refused a part.
    """
    if submission.plan.site.scheduler == "volcano":
        return submit_to_volcano(submission, run)
    return [str(job) for job in submit_to_slurm(submission, run, lock, after)]


def submit_to_slurm(
    submission: Submission, run: RunFolder, lock: int, after: Sequence[str] = ()
) -> list[int]:
    """Submit all tasks of a submission as arrays; returns the numbers of the jobs.

    The journal says what is about to be submitted before each call of sbatch and what was after,
    so that a kill in between is seen by whoever looks.

    Args:
        submission: the cells.
        run: where they lie.
        lock: the descriptor of the driver's lock; sbatch keeps it if this process is killed.
        after: jobs of this run that must have ended before.

    Raises:
        UserError: the script cannot be rendered, or the run folder cannot be written.
        PartlySubmitted: Slurm refused a part.
    """
    submission, script = _prepare(submission, run)
    journal = partial(run.journal, submission=submission.number)
    needs = [*_jobs_before(submission.plan), *map(int, after)]
    links = submission.plan.links
    scheduler = SlurmScheduler(script, links, journal, lock, needs)
    _execute(submission, run, scheduler, submission.parts)
    return scheduler.jobs


def submit_to_volcano(submission: Submission, run: RunFolder) -> list[str]:
    """Submit all tasks of a submission as jobs; returns their names.

    The server and its webhooks see them first, in a dry run.

    Raises:
        UserError: they cannot be rendered, the server would refuse them or does not answer, or the
            run folder cannot be written.
        PartlySubmitted: the server refused one all the same.
    """
    plan = submission.plan
    label = f"{RUN_LABEL}={mark_of(plan.folder)}"
    try:
        cluster = Cluster(plan.site.volcano.model_dump())
        journal = partial(run.journal, submission=submission.number)
        VolcanoScheduler(cluster, run, label, journal).check(_jobs(submission)[0])
    except SchedulerError as error:
        raise UserError(f"nothing is submitted: {error}") from None
    submission, _ = _prepare(submission, run)
    # With the number that it has got.
    jobs, text = _jobs(submission)
    manifest = run.scripts / f"{submission.number:03}.yaml"
    with plain_errors(f"write {manifest}"):
        disk.replace(manifest, text.encode())
    journal = partial(run.journal, submission=submission.number)
    scheduler = VolcanoScheduler(cluster, run, label, journal)
    _execute(submission, run, scheduler, jobs)
    return scheduler.jobs


def _jobs(submission: Submission) -> tuple[list[tuple[Job, dict[str, Any]]], str]:
    """The jobs with their manifests, and the text of all of them."""
    texts = [render_job(submission, job) for job in submission.jobs]
    jobs = [(job, parse_job(text)) for job, text in zip(submission.jobs, texts, strict=True)]
    return jobs, "---\n".join(texts)


def left_before(plan: Plan) -> list[str]:
    """The stages before ``plan`` that are not complete, by the names of their runs."""
    return [
        need.name
        for need in plan.needs
        if not is_file(need.folder / "plan.json") or _left(RunFolder.open(need.folder, need.digest))
    ]


def wait_longer(plan: Plan, run: RunFolder) -> None:
    """Let jobs of a later stage that are queued already wait for what its needs have got since.

    Raises:
        UserError: Slurm does not do it, and they could begin too early.
    """
    watcher = SlurmWatcher(run)
    watcher.ask()
    waiting = watcher.first_waiting()
    needs = _jobs_before(plan) if waiting else []
    if not needs:
        return
    try:
        wait_for(sorted(waiting), needs)
    except SlurmError as error:
        raise UserError(
            f"{plan.name} is queued, and may begin before the stages before it are complete: "
            f"{error}; its cells then fail, and the command given again repeats them"
        ) from None


def _jobs_before(plan: Plan) -> list[int]:
    return sorted({job for need in plan.needs for job in _unfinished_jobs(need)})


def _prepare(submission: Submission, run: RunFolder) -> tuple[Submission, Path]:
    """Write what the tasks need: the code, the record of the submission, the script."""
    with plain_errors(f"copy the code to {run.code}"):
        run.code.mkdir(exist_ok=True)
        submission.snapshot.write(run.code)
    # The number is taken when the record is there: another command may have been faster.
    number = run.write_submission({"created": now(), **submission.record()})
    submission = replace(submission, number=number)
    script = run.scripts / f"{number:03}.sh"
    with plain_errors(f"write {script}"):
        disk.replace(script, render_script(submission).encode())
    return submission, script


def _execute(
    submission: Submission, run: RunFolder, scheduler: Scheduler, work: Sequence[Any]
) -> None:
    executor = ScriptExecutor(run.scripts, scheduler)
    count = len(work)
    executor.map_array(run_task, [str(run.path)] * count, [submission.number] * count, work)


def at_a_time(plan: Plan) -> int:
    """How many tasks of ``plan`` a local site runs side by side."""
    fit = slots(plan.resources, plan.pack, plan.site)
    return min(fit, plan.max_running or fit)
