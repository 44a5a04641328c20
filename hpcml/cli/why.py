"""``hpcml why``: one cell's life."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option

if TYPE_CHECKING:
    from hpcml.launch.history import Submitted
    from hpcml.runs.folder import RunFolder
    from hpcml.runs.life import Attempt, Checkpoint, Life
    from hpcml.runs.status import CellState, Status


@click.command("why")
@click.argument("run", shell_complete=completion.runs)
@click.argument("cell", shell_complete=completion.cells)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@root_option
def command(run: str, cell: str, as_json: bool, root: Path | None) -> None:
    """Tell the life of a cell: submissions, attempts, checkpoints, how to run it by hand.

    RUN is a run folder, a run id or its beginning, or a recipe's name. CELL is an index, an id or
    its beginning, or "best".
    """
    from hpcml.cli import text
    from hpcml.launch.history import submissions_of
    from hpcml.launch.watch import watch
    from hpcml.runs.find import find_cell, find_run
    from hpcml.runs.life import life_of
    from hpcml.runs.status import CellState, waits_for_round
    from hpcml.runs.tables import json_value

    folder = find_run(run, root)
    line = find_cell(folder, cell)
    watcher = watch(folder)
    watcher.ask()
    status = watcher.refresh()
    if watcher.trouble:
        click.echo(f"hpcml: {watcher.trouble}", err=True)
    index = line["index"]
    state = status.cells.get(index) or CellState(
        line["id"],
        index,
        "pending",
        line["params"],
        reason=waits_for_round(folder, index, len(folder.proposals())),
    )
    life = life_of(folder, line["id"])
    submissions = submissions_of(folder, index)
    halving = _halving(folder, status, state)
    commands = _by_hand(folder, line, state, life, submissions)
    files = _files(folder, state, life)
    if as_json:
        document = {
            "run": str(folder.path),
            "cell": state.id,
            "index": index,
            "state": state.state,
            "reason": state.reason,
            "stuck": state.stuck,
            "params": line["params"],
            "metrics": state.metrics,
            "submissions": [asdict(submission) for submission in submissions],
            "attempts": [asdict(attempt) for attempt in life.attempts],
            "cancelled": life.cancelled,
            "anew": life.anew,
            "checkpoints": [asdict(checkpoint) for checkpoint in life.checkpoints],
            "halving": halving,
            "files": files,
            "by_hand": commands,
        }
        click.echo(json.dumps(json_value(document), indent=1))
        return
    click.echo(f"{text.cell_name(state, folder.swept)}, {state.id}, of {folder.path}")
    reason = f": {text.one_line(state.reason)}" if state.reason else ""
    click.echo(f"{state.state}{reason}\n")
    events = [event for one in submissions for event in _submission_lines(one)]
    events += [event for attempt in life.attempts for event in _attempt_lines(attempt, state)]
    events += [(time, "cancelled by a person") for time in life.cancelled]
    events += [(time, f"begins anew; what it had is in {aside}") for time, aside in life.anew]
    for time, what in sorted(events, key=lambda event: event[0]):
        click.echo(f"  {_clock(time)}  {text.message(what)}")
    if not events:
        click.echo("  never submitted: give the sweep command again")
    if halving:
        _section("Halving", _halving_lines(halving))
    if life.checkpoints:
        _section("Checkpoints", [_checkpoint_line(found) for found in life.checkpoints])
    _section("Files", [f"{name:11} {text.printable(path)}" for name, path in files.items()])
    params = line["params"]
    width = max(map(len, params), default=0)
    _section(
        "Parameters",
        [f"{text.printable(key):{width}}  {text.value(params[key])}" for key in params],
    )
    click.echo("\nBy hand, from the beginning, in a folder of its own")
    for row in commands:
        click.echo(row)


def _section(title: str, lines: list[str]) -> None:
    if lines:
        click.echo(f"\n{title}")
        for line in lines:
            click.echo(f"  {line}")


def _clock(time: str) -> str:
    """A time of an event as this machine's clock shows it."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(time).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return f"{time:19.19}"


def _submission_lines(submission: Submitted) -> list[tuple[str, str]]:
    from hpcml.recipe.units import format_duration

    where = {"local": "on this machine", "slurm": "to Slurm", "volcano": "to Volcano"}
    parts = [f"submission {submission.number} {where.get(submission.scheduler, '')}".rstrip()]
    if submission.rung is not None:
        parts.append(f"rung {submission.rung}")
    if submission.jobs:
        noun = "pod" if submission.scheduler == "volcano" else "job"
        shown = ", ".join(submission.jobs[:3]) + (", …" if len(submission.jobs) > 3 else "")
        parts.append(f"{noun} {shown}")
    elif submission.scheduler != "local":
        parts.append("no job of it is known")
    if submission.partition:
        parts.append(f"partition {submission.partition}")
    limit = submission.limit
    parts.append(f"{format_duration(limit)} per attempt" if limit else "no time limit")
    return [(submission.time, ", ".join(parts))]


def _attempt_lines(attempt: Attempt, state: CellState) -> list[tuple[str, str]]:
    from hpcml.runs.folder import now

    who = f"attempt {attempt.number}"
    if attempt.worker is not None:
        who = f"worker {attempt.worker}, {who}"
    start = f"{who} began on {attempt.host}"
    if attempt.job:
        start += f", job {attempt.job}"
    if attempt.rung is not None:
        start += f", rung {attempt.rung}"
    if attempt.resumed_from is not None:
        start += f", from the checkpoint of step {attempt.resumed_from}"
    lines = [(attempt.started or "", start)]
    lines += [(time, f"{who}: {note}") for time, note in attempt.notes]
    if attempt.ended:
        lines.append((attempt.ended, f"{who} {_end(attempt)}"))
    elif attempt.number == state.attempts and state.state == "running":
        lines.append((now(), f"{who} goes on" + _at(state.step)))
    else:
        # How far the last one got is in the metrics.
        step = state.step if attempt.number == state.attempts else attempt.step
        lines.append((attempt.started or "", f"{who} ended without a word" + _at(step)))
    return lines


def _at(step: int | None) -> str:
    return "" if step is None else f" at step {step}"


def _end(attempt: Attempt) -> str:
    from hpcml.cli import text
    from hpcml.runs.events import parse_time

    took = parse_time(attempt.ended or "") - parse_time(attempt.started or "")
    said = f"ended after {text.duration(took)}{_at(attempt.step)}: {attempt.cause}"
    if attempt.reason and attempt.reason != attempt.cause:
        said += f", {text.one_line(attempt.reason)}"
    if attempt.budget is not None and attempt.used is not None:
        left = attempt.budget - attempt.used
        key = f"retry.{attempt.cause} is {attempt.budget}"
        if left >= 0:
            said += f"; {key}, of which {left} left"
        else:
            said += f"; {key}" + (", used up" if attempt.budget else "")
    elif attempt.cause == "stopped":
        said += "; that uses no budget"
    return said


def _checkpoint_line(found: Checkpoint) -> str:
    from hpcml.cli import text

    whole = {None: "", True: ", all files are there", False: ", NOT whole"}[found.whole]
    names = f" ({', '.join(found.pointers)})" if found.pointers else ""
    return f"{text.printable(found.name)}  {text.size(found.bytes)}{whole}{names}"


def _files(folder: RunFolder, state: CellState, life: Life) -> dict[str, str]:
    from hpcml.runs.logs import cell_logs

    cell_dir = folder.cell_dir(state.id)
    files = {"folder": str(cell_dir)}
    logs = cell_logs(cell_dir)
    for log in logs:
        if log.rank == 0 and log.attempt == logs[-1].attempt:
            files[f"log ({log.stream})"] = str(log.path)
    for attempt in life.attempts[-1:]:
        if attempt.submission is not None and attempt.job:
            task = folder.tasks / f"{attempt.submission:03}.{attempt.job}.err"
            if task.exists():
                files["job's log"] = str(task)
        if attempt.snapshot:
            files["code"] = str(folder.path / attempt.snapshot)
    return files


def _halving(folder: RunFolder, status: Status, state: CellState) -> list[dict[str, Any]]:
    """Of each rung that the cell was in: its value, its place, and whom it was up against."""
    from hpcml.worker.halving import result_path

    halving = folder.plan.get("halving")
    if halving is None:
        return []
    metric, sign = halving["metric"], -1 if halving["mode"] == "max" else 1
    choices = folder.choices()
    ids = {index: cell_id for cell_id, index in folder.ids.items()}
    found = []
    members = list(range(halving["cells"][0]))
    for rung, steps in enumerate(halving["steps"], start=1):
        if state.index not in members:
            break
        values: dict[int, float] = {}
        for index in members:
            try:
                path = Path(result_path(str(folder.path), ids[index], halving, rung))
                number = json.loads(path.read_bytes())["metrics"].get(metric)
            except (OSError, ValueError, KeyError):
                continue
            if isinstance(number, (int, float)) and number - number == 0:
                values[index] = number
        ranked = sorted(values, key=lambda index: (sign * values[index], index))
        following = choices.get(rung + 1)
        found.append(
            {
                "rung": rung,
                "steps": steps,
                "metric": metric,
                "value": values.get(state.index),
                "place": ranked.index(state.index) + 1 if state.index in values else None,
                "of": len(members),
                "chosen": None if following is None else state.index in following,
                "next_cells": None
                if following is None
                else [{"index": index, "value": values.get(index)} for index in following],
            }
        )
        members = following or []
    return found


def _halving_lines(rungs: list[dict[str, Any]]) -> list[str]:
    from hpcml.cli import text

    lines = []
    for rung in rungs:
        line = f"rung {rung['rung']} (step {rung['steps']:,}): "
        if rung["value"] is None:
            line += f"no value of {rung['metric']}"
        else:
            line += f"{rung['metric']} {text.number(rung['value'])}, place {rung['place']}"
            line += f" of {rung['of']}"
        if rung["chosen"]:
            line += "; went on"
        elif rung["chosen"] is False:
            others = ", ".join(
                f"cell {other['index']} ({text.number(other['value'])})"
                for other in rung["next_cells"][:5]
            )
            more = len(rung["next_cells"]) - 5
            line += f"; dropped against {others}" + (f" and {more} more" if more > 0 else "")
        lines.append(line)
    return lines


def _by_hand(
    folder: RunFolder,
    line: dict[str, Any],
    state: CellState,
    life: Life,
    submissions: list[Submitted],
) -> list[str]:
    from hpcml.errors import UserError
    from hpcml.plan.stored import stored_plan
    from hpcml.render.by_hand import by_hand
    from hpcml.runs.status import waits_for_round

    code = next((attempt.snapshot for attempt in reversed(life.attempts) if attempt.snapshot), None)
    code = code or next((submission.code for submission in reversed(submissions)), None)
    if code is None:
        return ["# it was never submitted, so no copy of the code is there to run"]
    try:
        cell = json.loads((folder.cell_dir(state.id) / "cell.json").read_bytes())
    except (OSError, ValueError):
        cell = line
        unknown = waits_for_round(folder, state.index, len(folder.proposals()))
        if unknown or "\\u0000" in json.dumps(line):
            return ["# what it takes of an earlier stage or of a search is not known yet"]
    try:
        return by_hand(stored_plan(folder.path), cell, code, state.rung)
    except UserError as error:
        return [f"# not known: {error}"]
