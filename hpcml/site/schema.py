"""What a site's file may say: the scheduler, its environment and its habits."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from hpcml.recipe.container import SiteBindText
from hpcml.recipe.schema import Spending, VariableName
from hpcml.recipe.slurm import SlurmOptions
from hpcml.recipe.units import Duration, Memory
from hpcml.recipe.validation import Block
from hpcml.site.volcano import Volcano

#: Seconds. 419 unexpected interruptions in 54 days of a job on 16,384 GPUs, 2,048 nodes of 8:
#: Grattafiori et al., "The Llama 3 herd of models" (2024), section 3.3.4.
NODE_MTBF = 54 * 24 * 3600 * 2048 // 419


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


class Partition(Block):
    """A partition of Slurm, or a kind of nodes: what they have and what is allowed there."""

    name: str = Field(description="Its name.")
    cpus: Annotated[int, Field(ge=1)] = Field(description="Cores of a node.")
    memory: Memory = Field(description="Memory of a node that jobs can have.")
    gpus: Annotated[int, Field(ge=0)] = Field(0, description="GPUs of a node.")
    gpu_type: str | None = Field(None, description="The kind of GPU, as Slurm calls it.")
    gpu_memory: Memory | None = Field(
        None, description="Memory of a GPU. Default: what is known of `gpu_type`."
    )
    gpu_tflops: Annotated[float, Field(gt=0)] | None = Field(
        None,
        description="Dense peak of a GPU for bfloat16, in 10^12 operations per second. Default: "
        "what is known of `gpu_type`.",
    )
    mfu: Annotated[float, Field(gt=0, le=1)] = Field(
        # Llama 3 reached 0.38 to 0.43 on H100 (Grattafiori et al. 2024, table 4), PaLM 0.46 on
        # TPU v4 (Chowdhery et al. 2022), GPT of 1.7 B to 1 T parameters 0.44 to 0.52 on A100, where
        # recomputation counts as work (Narayanan et al. 2021, table 1).
        0.4,
        description="The part of that peak which trainings reach while they compute, for "
        "`hpcml plan`: recomputation and pipeline bubbles are added there.",
    )
    max_nodes: Annotated[int, Field(ge=1)] | None = Field(
        None, description="The most nodes that a job may have."
    )
    max_time: Duration | None = Field(None, description="The longest time that a job may have.")


class Storage(Block):
    """How fast the filesystem of the runs root is for one job."""

    write_speed: Annotated[Memory, Field(gt=0)] = Field(
        1024**3, description="Written in a second, by all nodes of a job."
    )
    read_speed: Annotated[Memory, Field(gt=0)] = Field(
        1024**3, description="Read in a second, by all nodes of a job."
    )


class Slurm(Block):
    """How this Slurm is used."""

    options: SlurmOptions = Field(
        default_factory=SlurmOptions, description="Options of every job; a recipe's `slurm` wins."
    )
    max_array_size: Annotated[int, Field(ge=1)] = Field(
        1001, description="`MaxArraySize` of the cluster: one more than the largest index."
    )
    coming_back: Literal["requeue", "chain"] = Field(
        "requeue",
        description="How a job that saved gets its next segment: `requeue`, it requeues itself, or "
        "`chain`, where users may not: the jobs that follow are submitted with the first one.",
    )
    links: Annotated[int, Field(ge=1, le=1000)] = Field(
        10, description="Jobs of a chain; those that are not needed end at once."
    )
    accounting: bool = Field(
        True, description="Whether sacct works. Without it ended jobs are known by their files."
    )


class Container(Block):
    """How images are run here. A recipe says which one, in its own `container`."""

    runtime: Literal["apptainer", "singularity", "pyxis"] = Field(
        description="What starts images: the command `apptainer` or `singularity`, or `pyxis`, the "
        "plugin of Slurm's srun."
    )
    gpu: Literal["nv", "rocm", "none"] = Field(
        "nv",
        description="How GPUs get into the image of a job that has some: `--nv`, `--rocm` or "
        "neither. pyxis does it by itself.",
    )
    binds: list[SiteBindText] = Field(
        default_factory=list,
        description="Folders and files that every image sees: `source[:destination[:ro]]`. "
        "`$VARIABLES` are replaced where hpcml is called.",
    )
    env: dict[VariableName, str] = Field(
        default_factory=dict,
        description="Environment variables inside the image; those of the site's `env` are there "
        "too. A recipe's win.",
    )
    options: list[str] = Field(
        default_factory=list,
        description="Further words of the command line, such as `--cleanenv`. They are trusted: "
        "hpcml puts them into the script as they are, so that `--bind=$TMPDIR:/scratch` works.",
    )
    images: str | None = Field(
        None,
        description="The folder where image files with a relative name lie, and where `hpcml "
        "container` puts them; nodes must see it. `~` and `$VARIABLES` are replaced.",
    )


def _partitions(partitions: list[Partition]) -> list[Partition]:
    names = [partition.name for partition in partitions]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(f"there are two partitions {name}")
    return partitions


class Site(Block):
    """One site: where jobs run, and how."""

    name: str = Field(description="The site's name, as in `--site NAME`.")
    description: str = Field("", description="One line for people, shown by `hpcml site list`.")
    scheduler: Literal["local", "slurm", "volcano"] = Field(
        description="What runs the jobs: `local`, this machine; `slurm`; or `volcano`, on "
        "Kubernetes."
    )
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
    partitions: Annotated[list[Partition], AfterValidator(_partitions)] = Field(
        default_factory=list,
        description="For Slurm: the partitions; for Volcano: the kinds of nodes. The preferred "
        "ones first: a job goes to the first that has what it asks for.",
    )
    storage: Storage = Field(
        default_factory=Storage,
        description="How fast the runs root is; `hpcml plan` computes with it.",
    )
    budget: Spending = Field(
        default_factory=Spending,
        description="What one command may submit at most, as its preview counts it; over that, "
        "`sweep` and `infer` ask, or refuse where nobody can answer, unless `--yes` is given.",
    )
    node_mtbf: Annotated[Duration, Field(gt=0)] = Field(
        NODE_MTBF,
        description="Mean time between two failures of one node. A job on n nodes fails n times "
        "as often.",
    )
    container: Container | None = Field(
        None, description="How images are run; without it recipes with an image are refused."
    )
    slurm: Slurm = Field(default_factory=Slurm, description="For Slurm: how it is used.")
    volcano: Volcano = Field(
        default_factory=Volcano, description="For Volcano: how it is used (docs/volcano.md)."
    )
    template: str | None = Field(
        None,
        description="A template of the site's own, relative to this file. It extends hpcml's, for "
        'example `{% extends "local/job.sh.j2" %}`, and overrides single blocks.',
    )
