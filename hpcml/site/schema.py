"""What a site's file may say: the scheduler, its environment and its habits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from hpcml.recipe.schema import VariableName
from hpcml.recipe.units import Duration, Memory
from hpcml.recipe.validation import Block


class Signal(Block):
    """How a payload learns that its time ends."""

    name: Literal["USR1", "USR2", "TERM"] = Field(
        "USR1", description="The signal that asks a payload to save and leave."
    )
    lead: Duration = Field(
        60,
        description="How long before its end a job gets the signal; a payload that has not left "
        "after this time is killed.",
    )


class Machine(Block):
    """What hpcml may use of this machine at once."""

    cpus: Annotated[int, Field(ge=1)] | None = Field(
        None, description="Cores. Default: those this process may run on."
    )
    gpus: Annotated[int, Field(ge=0)] | None = Field(
        None, description="GPUs. Default: those that are visible."
    )
    memory: Memory | None = Field(None, description="Memory. Default: what is installed.")


class Site(Block):
    """One site: where jobs run, and how."""

    name: str = Field(description="The site's name, as in `--site NAME`.")
    description: str = Field("", description="One line for people, shown by `hpcml site list`.")
    scheduler: Literal["local"] = Field(description="What runs the jobs: `local`, this machine.")
    match: str | None = Field(
        None,
        description="A regular expression; where it matches the host name in full, the site is "
        "chosen without `--site`.",
    )
    runs: str | None = Field(
        None,
        description="The runs root, on a filesystem that all nodes share. `~` and `$VARIABLES` "
        "are replaced. Default: `runs` in the current folder. `--root` and `$HPCML_RUNS` win.",
    )
    python: str | None = Field(
        None,
        description="The Python that jobs start. Default: the one that runs hpcml.",
    )
    env: dict[VariableName, str] = Field(
        default_factory=dict, description="Environment variables of every job."
    )
    setup: list[str] = Field(
        default_factory=list,
        description="Lines of shell at the start of every job, such as `module load cuda`. They "
        "are trusted: hpcml puts them into the script as they are.",
    )
    signal: Signal = Field(default_factory=Signal, description="How a job learns that it ends.")
    machine: Machine = Field(
        default_factory=Machine, description="For the local scheduler: what it may use."
    )
    template: str | None = Field(
        None,
        description="A template of the site's own, relative to this file. It extends hpcml's, for "
        'example `{% extends "local/job.sh.j2" %}`, and overrides single blocks.',
    )
