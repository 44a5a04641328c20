"""What a submission may take at most, and whether that is within the budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpcml.plan.plan import Submission
from hpcml.recipe.schema import Spending


@dataclass(frozen=True)
class Cost:
    """Hours of GPUs, or of cores where cells have no GPUs.

    Attributes:
        unit: ``GPU`` or ``core``.
        hours: the most it may take; None where jobs have no time limit.
    """

    unit: str
    hours: float | None

    def limit(self, budget: Spending) -> float | None:
        """What a budget allows of this unit; None: it doesn't say."""
        return budget.gpu_hours if self.unit == "GPU" else budget.core_hours

    def __str__(self) -> str:
        hours = self.hours or 0.0
        amount = f"{hours:,.0f}" if hours >= 100 else f"{hours:.3g}"
        return f"{amount} {self.unit} {'hour' if amount == '1' else 'hours'}"


def cost(submission: Submission) -> Cost:
    """What a submission may take at most, with the rungs or rounds that follow it.

    One attempt of each cell counts, to its time limit, or all jobs of its chain; what comes back
    otherwise takes as much again.
    """
    plan, resources = submission.plan, submission.plan.resources
    cells = len(submission.indices)
    if submission.rung is not None:
        cells += sum(plan.chain[submission.rung :])
    if resources.gpus:
        unit, each = "GPU", resources.gpus
    else:
        unit, each = "core", resources.processes * resources.cpus
    if cells and not resources.time:
        return Cost(unit, None)
    attempts = cells * plan.workers * plan.links
    return Cost(unit, attempts * resources.nodes * each * (resources.time or 0) / 3600)


def over_budget(submissions: Sequence[Submission]) -> Iterator[str]:
    """What of the submissions of a command is over a budget, in words.

    The recipe's budget, or the stage's, is about each submission, the site's about all together.
    """
    for submission in submissions:
        plan = submission.plan
        yield from _over(plan.name, f"budget of {plan.name}", plan.budget, [cost(submission)])
    site = submissions[0].plan.site
    names = ", ".join(submission.plan.name for submission in submissions)
    yield from _over(names, f"site {site.name}", site.budget, list(map(cost, submissions)))


def _over(what: str, whose: str, budget: Spending, costs: Sequence[Cost]) -> Iterator[str]:
    for unit in dict.fromkeys(each.unit for each in costs):
        same = [each for each in costs if each.unit == unit]
        limit = same[0].limit(budget)
        if limit is None:
            continue
        if any(each.hours is None for each in same):
            yield (
                f"{what}: {whose} allows {Cost(unit, limit)}, and without resources.time nothing "
                "limits what it takes"
            )
            continue
        total = Cost(unit, sum(each.hours or 0.0 for each in same))
        if total.hours is not None and total.hours > limit:
            yield f"{what} may take {total}; {whose} allows {Cost(unit, limit)}"
