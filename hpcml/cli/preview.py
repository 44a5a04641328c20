"""What a submission will do, in a few lines."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcml.cli import text
from hpcml.launch.slurm.scheduler import command
from hpcml.launch.submit import at_a_time
from hpcml.plan import Submission
from hpcml.plan.cost import cost
from hpcml.recipe.units import format_duration, format_memory
from hpcml.render import render_job, render_script
from hpcml.runs.folder import RunFolder
from hpcml.runs.status import CellState


def describe(submission: Submission) -> str:
    """Lines for a person: how many cells, on what, where."""
    plan = submission.plan
    resources = plan.resources
    total, left = len(plan.cells), len(submission.indices)
    over = f" over {', '.join(plan.swept)}" if plan.swept else ""
    lines = [f"{plan.name}: {_count(total, 'cell')}{over} on site {plan.site.name}"]
    if submission.rung is not None:
        course = _course(plan.halving, total) if plan.halving else _search(plan.search or {})
        lines += [f"  {course}", f"  {of_rung(submission)}"]
        first = 0 if plan.search else submission.rung - 1
        total = sum(plan.chain[first : submission.rung])
    if left < total:
        before = "done before" if plan.site.scheduler == "local" else "done or queued before"
        lines.append(f"  {total - left} {before}, {left} left to run")
        if RunFolder(plan.folder).codes() - {submission.code}:
            lines.append(
                "  note: the code has changed since; what is done stays done. To run it anew "
                "remove the run folder, or give another --root"
            )
    if left:
        packed = f" of up to {_count(plan.pack, 'cell')}" if plan.pack > 1 else ""
        if plan.workers > 1:
            packed = f", {plan.workers} for each cell"
        lines.append(f"  {_count(submission.tasks, 'task')}{packed}, {_pace(submission)}")
    each = [
        _count(resources.processes, "process", "processes"),
        f"{_count(resources.cpus, 'core')} per process",
        _count(resources.gpus, "GPU") if resources.gpus else "",
        format_memory(resources.memory) if resources.memory else "",
        f"{format_duration(resources.time)} per attempt" if resources.time else "no time limit",
    ]
    lines.append(f"  each cell: {', '.join(part for part in each if part)}")
    if most := _cost(submission):
        lines.append(f"  {most}")
    lines.append(f"  run folder: {plan.folder}")
    return "\n".join(lines)


def _cost(submission: Submission) -> str:
    """The hours of GPUs, or else of cores, that what is submitted may take; empty if unlimited."""
    most, links = cost(submission), submission.plan.links
    if not most.hours:
        return ""
    if links > 1:
        return f"at most {most}, if every chain needs its {links} jobs"
    return f"at most {most} for one attempt of each"


def cell_lines(submission: Submission) -> Iterator[str]:
    """The cells of a submission, a line each."""
    plan = submission.plan
    for index in submission.indices:
        cell = plan.cells[index]
        state = CellState(cell.id, index, "pending", cell.params)
        yield f"  {text.cell_name(state, list(plan.swept))}"


def name_of(submission: Submission) -> str:
    """The rung or the round that a submission is."""
    return f"{'round' if submission.plan.search else 'rung'} {submission.rung}"


def of_rung(submission: Submission) -> str:
    """A line on a rung of a halving, or on a round of a search."""
    halving, rung = submission.plan.halving, submission.rung
    assert rung is not None
    line = (
        f"{name_of(submission)} of {len(submission.plan.chain)}: "
        f"{_count(len(submission.indices), 'cell')}"
    )
    return line + (f" to step {halving['steps'][rung - 1]:,}" if halving else "")


def _search(search: Mapping[str, Any]) -> str:
    """What is sought, and how."""
    cells = search["cells"]
    return (
        f"search by {search['sampler']} for the {search['mode']} of {search['metric']}: "
        f"{_count(len(cells), 'round')} of {_count(cells[0], 'cell')}; what they try is proposed "
        "when a round begins"
    )


def _course(halving: Mapping[str, Any], total: int) -> str:
    """How far how many cells go, and how much of a whole sweep that is."""
    steps, before = 0, 0
    for cells, end in zip(halving["cells"], halving["steps"], strict=True):
        steps += cells * (end - before)
        before = end
    whole = total * before
    rungs = ", ".join(
        f"{cells:,} to {end:,}"
        for cells, end in zip(halving["cells"], halving["steps"], strict=True)
    )
    return (
        f"halving by {halving['metric']} ({halving['mode']}), cells to step: {rungs}; "
        f"{steps:,} steps in all, {steps / whole:.0%} of the {whole:,} of every cell to the end"
    )


def calls(submission: Submission, before: Sequence[str] = ()) -> Iterator[str]:
    """The commands that would submit it, one a line; none where no other program does."""
    plan = submission.plan
    if plan.site.scheduler != "slurm":
        return
    script = plan.folder / "scripts" / f"{submission.number:03}.sh"
    names: dict[int, str] = {}
    needs = [*(f"<the job of {need.name}>" for need in plan.needs), *before]
    for part in submission.parts:
        after = None if part.after is None else names[part.after]
        for link in range(plan.links):
            yield shlex.join(command(script, part, after, needs))
            after = names[part.number] = f"<job {part.number * plan.links + link + 1}>"


def text_of(submission: Submission) -> str:
    """What would be submitted, byte for byte: the script, or for Volcano the jobs.

    The jobs can be piped to kubectl; the script that their pods run is in a comment after them.

    Raises:
        UserError: it cannot be rendered.
    """
    script = render_script(submission)
    if submission.plan.site.scheduler != "volcano":
        return script
    jobs = "---\n".join(render_job(submission, job) for job in submission.jobs)
    lines = (f"# {line}".rstrip() for line in script.split("\n")[:-1])
    return f"{jobs}# scripts/{submission.number:03}.sh:\n" + "\n".join(lines) + "\n"


def _pace(submission: Submission) -> str:
    plan = submission.plan
    if plan.site.scheduler == "local":
        return f"{min(at_a_time(plan), submission.tasks)} at a time"
    if plan.site.scheduler == "volcano":
        lanes = min(submission.tasks, plan.max_running or submission.tasks)
        pods = _count(lanes * plan.resources.nodes, "pod")
        jobs = _count(len(submission.jobs), "job")
        one_by_one = ", one task after another in each" if lanes < submission.tasks else ""
        return f"in {jobs} of {pods} together{one_by_one}"
    arrays = f"in {_count(len(submission.parts), 'array')}"
    if plan.links > 1:
        arrays += f", each {plan.links} times as a chain"
    cap = f"at most {plan.max_running} at a time" if plan.max_running else "as Slurm has room"
    return f"{arrays}, {cap}"


def _count(number: int, noun: str, plural: str | None = None) -> str:
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"
