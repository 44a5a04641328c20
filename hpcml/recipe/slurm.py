"""Slurm's options, for sites and recipes: those with a name here, and any other as it is."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from hpcml.recipe.units import Memory
from hpcml.recipe.validation import Block

_OPTION = re.compile(r"[a-z][a-z0-9-]*")

# What hpcml writes itself, and which key to use instead.
_OURS = {
    "array": "array.max_running, array.pack",
    "chdir": "command.directory",
    "cpus-per-gpu": "resources.cpus",
    "cpus-per-task": "resources.cpus",
    "dependency": "stages",
    "error": "hpcml logs",
    "export": "env, env_from",
    "export-file": "env, env_from",
    "gpus": "resources.gpus",
    "gpus-per-node": "resources.gpus",
    "gpus-per-socket": "resources.gpus",
    "gpus-per-task": "resources.gpus",
    "gres": "resources.gpus",
    "job-name": "name",
    "kill-on-invalid-dep": "stages",
    "mem": "resources.memory",
    "nodes": "resources.nodes",
    "ntasks": "resources.processes",
    "ntasks-per-core": "resources.processes",
    "ntasks-per-gpu": "resources.processes",
    "ntasks-per-node": "resources.processes",
    "ntasks-per-socket": "resources.processes",
    "open-mode": "hpcml logs",
    "output": "hpcml logs",
    "parsable": "nothing",
    "requeue": "the site's coming_back",
    "no-requeue": "the site's coming_back",
    "signal": "the site's signal",
    "test-only": "hpcml sweep --dry-run",
    "time": "resources.time",
    "wait": "hpcml sweep --wait",
    "wrap": "command.run",
}

# Keys that have another name than the option.
OPTION_NAMES = {"memory_per_cpu": "mem-per-cpu"}

# Groups of options of which sbatch takes one.
EXCLUSIVE = (
    ("mem", "mem-per-cpu", "mem-per-gpu"),
    ("exclusive", "oversubscribe"),
    ("nodelist", "nodefile"),
    ("core-spec", "thread-spec"),
)


def _one_line(value: str) -> str:
    if not value or re.search(r"[\0-\x1f\x7f\x85\u2028\u2029]", value):
        raise ValueError("must be one line of text that is not empty")
    return value


def _raw(options: dict[str, Any]) -> dict[str, Any]:
    for name, value in options.items():
        if not _OPTION.fullmatch(name):
            raise ValueError(
                f"{name!r} is no long option of sbatch; write it without the dashes, as in "
                "`switches: 1`"
            )
        if name in _OURS:
            raise ValueError(f"{name} is set by hpcml; use {_OURS[name]}")
        if isinstance(value, (dict, list)) or value is None:
            raise ValueError(f"{name} must be text, a number, or true for an option without value")
        if isinstance(value, str):
            _one_line(value)
    return options


Line = Annotated[str, AfterValidator(_one_line)]


class SlurmOptions(Block):
    """Options of sbatch that depend on the cluster and the person. A recipe's win over a site's."""

    partition: Line | None = Field(
        default=None, description="The partition; by default the first of the site's that fits."
    )
    account: Line | None = Field(default=None, description="The account that is charged.")
    qos: Line | None = Field(default=None, description="The quality of service.")
    reservation: Line | None = Field(default=None, description="A reservation.")
    constraint: Line | None = Field(default=None, description="Features that nodes must have.")
    nodelist: Line | None = Field(default=None, description="Nodes that the job must get.")
    exclude: Line | None = Field(default=None, description="Nodes that the job must not get.")
    licenses: Line | None = Field(default=None, description="Licenses, as in `matlab:1`.")
    exclusive: bool | None = Field(
        default=None,
        description="Whole nodes, shared with nobody. A job then has all of their memory, and "
        "`resources.memory` only chooses the partition.",
    )
    nice: int | None = Field(default=None, description="A lower priority, from 0.")
    begin: Line | None = Field(default=None, description="The earliest time to start.")
    comment: Line | None = Field(default=None, description="A text that the accounting keeps.")
    mail_user: Line | None = Field(default=None, description="Whom to write.")
    mail_type: Line | None = Field(default=None, description="About what, as in `END,FAIL`.")
    memory_per_cpu: Memory | None = Field(
        default=None, description="Memory of each core, where `resources.memory` is not given."
    )
    time_min: Annotated[str, BeforeValidator(str)] | None = Field(
        default=None,
        description="A shorter time that will do as well, so that a job fits into more gaps; the "
        "form is that of `resources.time`.",
    )
    gpu_type: Line | None = Field(default=None, description="The kind of GPU, as in `h100`.")
    gpu_option: Literal["gres", "gpus-per-node"] | None = Field(
        default=None, description="Which of Slurm's two options asks for GPUs."
    )
    sbatch: Annotated[dict[str, Any], AfterValidator(_raw)] = Field(
        default_factory=dict,
        description="Any other long option of sbatch, without its dashes: `switches: 1`, "
        "`contiguous: true`.",
    )

    @model_validator(mode="after")
    def _once(self) -> SlurmOptions:
        for key in self.model_fields_set:
            name = OPTION_NAMES.get(key, key.replace("_", "-"))
            if name in self.sbatch:
                raise ValueError(f"{name} is given twice, as {key} and in sbatch; leave one out")
        return self
