"""From a plan to text: the only place that writes shell."""

from hpcml.render.environment import Trusted, shell_environment, yaml_environment
from hpcml.render.manifest import RUN_LABEL, parse_job, render_job
from hpcml.render.script import render_script

__all__ = [
    "RUN_LABEL",
    "Trusted",
    "parse_job",
    "render_job",
    "render_script",
    "shell_environment",
    "yaml_environment",
]
