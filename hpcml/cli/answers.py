"""What an inference looks like in the terminal: speed, failures, lengths, some answers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hpcml.cli import text
from hpcml.runs.answers import Answers, answers, samples
from hpcml.runs.results import Result, Results

if TYPE_CHECKING:
    from rich.console import Console

_SAMPLES = 5
_BAR = 40
# With more cells than this, the table of cells says enough.
_CELLS = 4


def print_answers(output: Console, results: Results) -> None:
    """Print what the first cells of an inference have that are merged."""
    merged = [
        (row, found)
        for row in results.rows[:_CELLS]
        if (found := answers(results.run, row.cell.id)) is not None
    ]
    for row, found in merged:
        _print_cell(output, results, row, found)


def _print_cell(output: Console, results: Results, row: Result, found: Answers) -> None:
    proof = found.proof
    output.print()
    output.print(f"Answers of {text.cell_name(row.cell, results.run.swept)}", style="bold")
    output.print(f"  {proof['output']}", soft_wrap=True)
    rows = f"{proof['rows_out']:,} rows of {proof['rows_in']:,}, each once"
    output.print(f"  {rows}; {proof['answered']:,} answered, {proof['failed']:,} failed")
    tokens = f"{proof['prompt_tokens']:,} tokens of prompts, {proof['output_tokens']:,} of answers"
    output.print(f"  {tokens}")
    gpus = results.run.plan["resources"]["gpus"]
    took = f"{text.duration(found.wall_seconds)} by {found.workers} workers"
    if found.workers == 1:
        took = text.duration(found.wall_seconds)
    cost = found.worker_seconds * (gpus or 1) / 3600
    speed = text.speed(found.tokens_per_second)
    output.print(
        f"  {took}: {speed} tokens/s; {cost:.2f} {'GPU' if gpus else 'worker'}-hours in all"
    )
    if proof["errors"]:
        output.print("  failed because", style="bold")
        for cause, count in proof["errors"].items():
            output.print(f"    {count:>9,}  {cause}")
    if proof["output_lengths"]:
        output.print("  tokens of answers", style="bold")
        most = max(proof["output_lengths"].values())
        for length, count in proof["output_lengths"].items():
            bar = "█" * max(1, round(_BAR * count / most))
            output.print(f"    up to {length:>6}  {count:>9,}  {bar}")
    output.print("  the first answers", style="bold")
    for sample in samples(proof["output"], _SAMPLES):
        line = text.one_line(f"{sample.key}: {sample.text}")
        output.print(
            f"    {line}", style="red" if sample.failed else "", overflow="ellipsis", no_wrap=True
        )
