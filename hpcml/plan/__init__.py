"""From a recipe and a site to a plan."""

from hpcml.plan.plan import Plan, Submission, compile_plan, compile_stages, take_snapshot
from hpcml.plan.resources import Resources

__all__ = ["Plan", "Resources", "Submission", "compile_plan", "compile_stages", "take_snapshot"]
