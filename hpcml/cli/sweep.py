"""`hpcml sweep`: the main command."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from hpcml.cli import completion
from hpcml.cli.options import (
    dry_run_option,
    root_option,
    settings_option,
    site_option,
    wait_option,
    yes_option,
)
from hpcml.cli.output import no_reason_to_stop
from hpcml.errors import UserError

if TYPE_CHECKING:
    from hpcml.plan import Plan, Snapshot, Submission
    from hpcml.runs.folder import RunFolder
    from hpcml.runs.status import Status

#: Jobs that are named when they are submitted.
_NAMED = 10


@click.command("sweep")
@click.argument("recipe", type=click.Path(path_type=Path), shell_complete=completion.recipes)
@settings_option
@site_option
@dry_run_option
@click.option("--cells", is_flag=True, help="With --dry-run: list the cells as well.")
@wait_option
@yes_option
@root_option
@click.pass_context
def command(
    context: click.Context,
    recipe: Path,
    settings: tuple[str, ...],
    site: str | None,
    dry_run: bool,
    cells: bool,
    wait: bool,
    yes: bool,
    root: Path | None,
) -> None:
    """Run every cell of RECIPE: here, to their end, or on a cluster, which goes on by itself.

    The same command again continues the run: cells that are done are skipped, failed ones start
    again, unfinished ones continue from their checkpoint.
    """
    from hpcml.plan import compile_stages
    from hpcml.recipe.load import load_stages
    from hpcml.site.search import find_site

    if cells and not dry_run:
        raise UserError("--cells lists what --dry-run would submit; give both")
    plans = compile_stages(load_stages(recipe, settings), find_site(site), root)
    for note in dict.fromkeys(note for plan in plans for note in plan.notes):
        click.echo(f"note: {note}", err=True)
    if dry_run:
        preview(plans, cells=cells)
    else:
        with no_reason_to_stop():
            code = run_plans(plans, wait=wait, yes=yes)
        context.exit(code)


def preview(plans: list[Plan], *, cells: bool = False) -> None:
    """The scripts go to stdout, byte for byte; what they will do, to stderr."""
    from hpcml.cli.preview import calls, cell_lines, describe, name_of, of_rung, text_of
    from hpcml.launch.submit import next_submissions
    from hpcml.plan.cost import over_budget

    first: list[Submission] = []
    for plan in plans:
        after: list[str] = []
        for submission in next_submissions(plan):
            click.echo(f"  {of_rung(submission)}" if after else describe(submission), err=True)
            # The places of a later rung are nobody's yet.
            if cells and not after:
                click.echo("\n".join(cell_lines(submission)), err=True)
            if submission.indices:
                for line in calls(submission, after):
                    click.echo(line, err=True)
                click.echo(text_of(submission), nl=False)
            if not after:
                first.append(submission)
            after = [f"<the jobs of {name_of(submission)}>"]
    for line in over_budget(first):
        click.echo(f"note: {line}; --yes submits it all the same", err=True)


def run_plans(plans: list[Plan], *, wait: bool, yes: bool = False) -> int:
    """Run the stages of a recipe, mostly one; the exit code is that of the first that fails."""
    from hpcml.cli.budget import keep_to_budget
    from hpcml.cli.preview import text_of
    from hpcml.launch.submit import create_run, left_before, next_submissions

    previews = [next_submissions(plan)[0] for plan in plans]
    for preview in previews:
        text_of(preview)  # a fault must show before anything is made
    keep_to_budget(previews, yes=yes)
    runs: list[RunFolder] = []
    later: list[str] = []
    for plan, preview in zip(plans, previews, strict=True):
        if plan.site.scheduler == "local":
            code = _run_here(next_submissions(plan), create_run(plan))
        else:
            # Volcano has no job that waits for the end of others.
            before = left_before(plan) if plan.site.scheduler == "volcano" else []
            if before and not wait:
                later.append(f"{plan.name} begins when {', '.join(before)} is done")
                continue
            code = _follow_all(runs) if before else 0
            if not code:
                runs.append(create_run(plan))
                code = _hand_over(plan, preview.snapshot, runs[-1])
                if plan.chain and plan.site.scheduler == "volcano" and not code:
                    if wait:
                        code = _later_rungs(plan, preview.snapshot, runs[-1])
                    else:
                        what = "round" if plan.search else "rung"
                        later.append(f"{plan.name}: a {what} begins when the one before is over")
        if code:
            _say_what_waits(plan, plans)
            return code
    if wait:
        return _follow_all(runs)
    _say_what_next(runs)
    for line in later:
        click.echo(f"  {line}: give the command again then, or with --wait now", err=True)
    return 0


def _follow_all(runs: list[RunFolder]) -> int:
    """Follow runs to their end, and forget them; the exit code is that of the first that fails."""
    code = 0
    while runs and not code:
        code = _follow(runs.pop(0))
    return code


def _later_rungs(plan: Plan, code: Snapshot, run: RunFolder) -> int:
    """Submit rungs or rounds, each when the one before is over; returns the exit code."""
    from hpcml.cli.view import look
    from hpcml.launch.submit import decide, decided
    from hpcml.runs.folder import now
    from hpcml.worker.chain import NotOver

    began = now()
    for rung in range(2, len(plan.chain) + 1):
        if rung in decided(run):
            continue
        if look(run, releases=True) is None:
            return 130
        try:
            decide(plan, run, rung, began)
        except NotOver as error:
            click.echo(f"hpcml: {error}", err=True)
            return 1
        if failed := _hand_over(plan, code, run):
            return failed
    return 0


def _say_what_waits(plan: Plan, plans: list[Plan]) -> None:
    waiting = [other.name for other in plans[plans.index(plan) + 1 :]]
    if waiting:
        click.echo(f"{', '.join(waiting)} not begun; give the command again to go on", err=True)


def _run_here(submissions: list[Submission], run: RunFolder) -> int:
    """Run the cells on this machine, to their end, one rung or round after another."""
    from hpcml.cli.preview import describe, of_rung
    from hpcml.launch.drive import only_driver
    from hpcml.launch.submit import begin_rung, renew_plan
    from hpcml.runs.folder import now
    from hpcml.runs.status import collect
    from hpcml.worker.chain import NotOver

    began = now()
    interrupted, status = False, None
    with only_driver(run):
        run = renew_plan(submissions[0].plan, run)
        for submission in submissions:
            try:
                following = begin_rung(submission, run, began)
            except NotOver as error:
                click.echo(f"hpcml: {error}", err=True)
                break
            what = describe(following) if status is None else of_rung(following)
            interrupted, status = _drive(following, run, what)
            if interrupted:
                break
        status = status or collect(run)
    code = _finish(run, status)
    return 130 if interrupted else code


def _drive(submission: Submission, run: RunFolder, what: str) -> tuple[bool, Status]:
    """Run the tasks of a submission to their end: whether it was interrupted, and the states."""
    from hpcml.cli import text
    from hpcml.cli.view import progress
    from hpcml.launch.drive import drive
    from hpcml.launch.submit import submit_here
    from hpcml.runs.status import Watcher

    interrupted = False
    watcher = Watcher(run)
    click.echo(what, err=True)
    if submission.indices:
        scheduler = submit_here(submission, run)
        with progress(run) as view:
            interrupted = drive(scheduler, lambda: view.refresh(watcher.refresh()), view.say)
        for task, code in scheduler.broken.items():
            words = text.one_line(scheduler.last_words(task)) or "it left no words"
            click.echo(f"task {task} broke off with exit code {code}: {words}", err=True)
    return interrupted, watcher.refresh()


def _finish(run: RunFolder, status: Status) -> int:
    """Show how a run ended, and keep the table; the exit code is about the cells alone."""
    from hpcml.cli.view import print_summary
    from hpcml.runs.results import results
    from hpcml.runs.tables import write_parquet

    ranked = results(run, status)
    print_summary(ranked, status)
    try:
        write_parquet(ranked, run.results_file)
    except UserError as error:
        click.echo(f"hpcml: {error}", err=True)
    return 0 if status.complete else 1


def add_workers(plan: Plan, count: int) -> int:
    """Let ``count`` more workers share the cells of a run that goes on; returns the exit code."""
    from hpcml.cli.preview import describe
    from hpcml.launch.cluster import PartlySubmitted
    from hpcml.launch.drive import only_driver
    from hpcml.launch.submit import more_workers, settle, submit_to_cluster
    from hpcml.runs.folder import RunFolder

    if not (plan.folder / "plan.json").exists():
        raise UserError(f"there is no run {plan.folder} yet; leave out --more to begin it")
    run = RunFolder.open(plan.folder, plan.digest)
    submission = more_workers(plan, run, count)
    if plan.site.scheduler == "local":
        # Beside the command that runs the others: workers have nothing in common.
        interrupted, status = _drive(submission, run, describe(submission))
        return 130 if interrupted else int(not status.complete)
    with only_driver(run) as lock:
        settle(run)
        click.echo(describe(submission), err=True)
        if not submission.indices:
            click.echo("nothing is left to do")
            return 0
        try:
            jobs = submit_to_cluster(submission, run, lock)
        except PartlySubmitted as error:
            click.echo(f"hpcml: {error}", err=True)
            return 1
    _say_submitted(jobs)
    return 0


def run_chosen(
    plan: Plan, run: RunFolder, choose: Callable[[], Sequence[int]], *, wait: bool
) -> int:
    """Run some cells of a run again, in the code of its newest submission.

    Args:
        plan: the run's plan.
        run: the run.
        choose: the cells; called as the run's only driver, when all that is queued is known.
        wait: on a cluster: follow them to their end.

    Returns:
        The exit code.
    """
    from hpcml.launch.cluster import PartlySubmitted
    from hpcml.launch.drive import only_driver
    from hpcml.launch.submit import left_before, resubmission, settle, submit_to_cluster

    here = plan.site.scheduler == "local"
    with only_driver(run) as lock:
        if not here:
            for job in settle(run):
                click.echo(f"job {job} had been submitted by a command that was cut off", err=True)
        if before := left_before(plan) if plan.site.scheduler != "slurm" else []:
            raise UserError(f"{plan.name} begins when {', '.join(before)} is done")
        resubmission(plan, run, ())  # a fault must show before anything is set aside
        submission = resubmission(plan, run, choose())
        if not submission.indices:
            click.echo(f"no cell of {run.path} has failed")
            return 0
        count = len(submission.indices)
        what = f"{plan.name}: {count} of {len(plan.cells)} cells again on site {plan.site.name}"
        if here:
            interrupted, status = _drive(submission, run, what)
        else:
            click.echo(what, err=True)
            try:
                jobs = submit_to_cluster(submission, run, lock)
            except PartlySubmitted as error:
                click.echo(f"hpcml: {error}", err=True)
                return 1
    if here:
        code = _finish(run, status)
        return 130 if interrupted else code
    _say_submitted(jobs)
    if wait:
        return _follow(run)
    _say_what_next([run])
    return 0


def _hand_over(plan: Plan, code: Snapshot, run: RunFolder) -> int:
    """Give the cells to a cluster's scheduler, which goes on without this command."""
    from hpcml.cli.preview import describe, of_rung
    from hpcml.launch.cluster import PartlySubmitted
    from hpcml.launch.drive import only_driver
    from hpcml.launch.submit import (
        begin_next_rung,
        begin_rung,
        next_submissions,
        release,
        renew_plan,
        settle,
        submit_to_cluster,
        wait_longer,
    )
    from hpcml.worker.chain import NotOver

    with only_driver(run) as lock:
        run = renew_plan(plan, run)
        for job in settle(run):
            click.echo(f"job {job} had been submitted by a command that was cut off", err=True)
        for line in release(run):
            click.echo(line, err=True)
        if plan.needs and plan.site.scheduler == "slurm":
            wait_longer(plan, run)
        # Once more: what another command has submitted meanwhile is seen only under the lock.
        if plan.site.scheduler == "volcano":
            begin_next_rung(plan, run)
        first, *further = next_submissions(plan, code)
        jobs: list[str] = []
        try:
            first = begin_rung(first, run)
            click.echo(describe(first), err=True)
            if first.indices:
                jobs = submit_to_cluster(first, run, lock)
            # Volcano has no job that waits for the end of others.
            for submission in further if plan.site.scheduler == "slurm" else ():
                click.echo(f"  {of_rung(submission)}, when the one before is over", err=True)
                jobs += submit_to_cluster(submission, run, lock, jobs)
        except (PartlySubmitted, NotOver) as error:
            if jobs:
                _say_submitted(jobs)  # the rungs before
            click.echo(f"hpcml: {error}", err=True)
            return 1
    if jobs:
        _say_submitted(jobs)
    return 0


def _say_submitted(jobs: list[str]) -> None:
    more = f" and {len(jobs) - _NAMED} more" if len(jobs) > _NAMED else ""
    click.echo(f"submitted as {', '.join(jobs[:_NAMED])}{more}")


def _say_what_next(runs: list[RunFolder]) -> None:
    from hpcml.runs.find import reference

    for run in runs:
        click.echo(f"Next\n  hpcml watch {reference(run)}   shows how far it is")


def _follow(run: RunFolder) -> int:
    """Show a run on a cluster until its end, and how it ended; returns the exit code."""
    from hpcml.cli.view import look

    status = look(run, releases=True)
    return 130 if status is None else _finish(run, status)
