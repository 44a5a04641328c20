"""Asking before more is submitted than the budget allows."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from hpcml.errors import UserError
from hpcml.plan import Submission
from hpcml.plan.cost import over_budget


def keep_to_budget(submissions: Sequence[Submission], *, yes: bool) -> None:
    """Go on only if what is to be submitted is within the budget, or somebody says that it shall.

    Raises:
        UserError: it is over, and nobody does.
    """
    lines = list(over_budget(submissions))
    for line in lines:
        click.echo(f"note: {line}", err=True)
    if not lines or yes:
        return
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise UserError("that is over the budget; --yes submits it all the same")
    if not click.confirm("Submit it all the same?", err=True):
        raise UserError("nothing was submitted")
