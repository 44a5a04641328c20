"""From a recipe and a site to a plan."""

from hpcml.plan.plan import Plan, Submission, compile_plan, compile_stages, take_snapshot
from hpcml.plan.resources import Resources
from hpcml.plan.snapshot import Snapshot

__all__ = [
    "Plan",
    "Resources",
    "Snapshot",
    "Submission",
    "compile_plan",
    "compile_stages",
    "take_snapshot",
]
