"""From a plan to text: the only place that writes shell."""

from hpcml.render.environment import Trusted, shell_environment, yaml_environment
from hpcml.render.script import render_script

__all__ = ["Trusted", "render_script", "shell_environment", "yaml_environment"]
