"""What a plan asks of Slurm: the options of its jobs."""

from __future__ import annotations

from typing import Any

from hpcml.errors import UserError
from hpcml.plan.partitions import choose_partition
from hpcml.plan.resources import Resources
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.slurm import EXCLUSIVE, OPTION_NAMES, SlurmOptions
from hpcml.recipe.units import format_duration, parse_duration
from hpcml.site.schema import Site

Directives = tuple[tuple[str, str | None], ...]


def directives(
    loaded: LoadedRecipe, resources: Resources, site: Site, lead: int
) -> tuple[Directives, tuple[str, ...]]:
    """The options of a job in the order of the script, and notes on options that gave way.

    Every option of the recipe wins over the site's, also one that is false or null there. Where
    sbatch takes only one of two options, and one comes from each, the recipe's stays and the note
    names the other. A job that has whole nodes has all of their memory, whatever it asked for.

    Raises:
        UserError: one of them gives two options of which sbatch takes one.
    """
    recipe = loaded.recipe
    pack = recipe.array.pack
    mine, theirs = _named(recipe.slurm), _named(site.slurm.options)
    theirs = {name: value for name, value in theirs.items() if name not in _dropped(recipe.slurm)}
    memory = resources.memory * pack if resources.memory else None
    if memory is not None:
        mine["mem"] = _megabytes(memory)
    notes = []
    for group in EXCLUSIVE:
        own = [name for name in group if name in mine]
        others = [name for name in group if name in theirs and name not in own]
        for names, where in (
            (own, f"{loaded.document.where('slurm')}: slurm"),
            ([] if own else others, f"site {site.name}: slurm.options"),
        ):
            if len(names) > 1:
                raise UserError(
                    f"{where}: sbatch takes only one of {' and '.join(names)}; leave one out"
                )
        for name in others if own else []:
            del theirs[name]
            notes.append(f"{own[0]} of the recipe wins over {name} of site {site.name}")
    chosen = {**theirs, **mine}
    if memory is not None and chosen.get("exclusive", "") is None:
        whose = "the recipe" if "exclusive" in mine else f"site {site.name}"
        chosen["mem"] = "0"
        notes.append(
            f"exclusive of {whose} wins over resources.memory: a job has whole nodes, with all of "
            "their memory"
        )
    partition = choose_partition(loaded, resources, site)
    if partition is not None and "partition" not in chosen:
        chosen["partition"] = partition.name
    gpu_option = chosen.pop("gpu-option", None) or "gres"
    gpu_type = chosen.pop("gpu-type", None)
    if resources.gpus:
        count = f"{gpu_type + ':' if gpu_type else ''}{resources.gpus * pack}"
        chosen[gpu_option] = f"gpu:{count}" if gpu_option == "gres" else count
    time = resources.time
    ours: dict[str, Any] = {
        "job-name": recipe.name,
        "nodes": str(resources.nodes),
        "ntasks-per-node": "1",
        "cpus-per-task": str(resources.processes * resources.cpus * pack),
    }
    if time is not None:
        ours["time"] = format_duration(time)
    ours["signal"] = f"B:{site.signal.name}@{lead}"
    # Logs of a job that comes back continue; where it may not requeue itself, Slurm must not.
    ours["open-mode"] = "append"
    ours["requeue" if site.slurm.coming_back == "requeue" else "no-requeue"] = None
    return tuple({**ours, **chosen}.items()), tuple(notes)


def _named(options: SlurmOptions) -> dict[str, str | None]:
    """The options that are given, by sbatch's names; None stands for one without a value."""
    found: dict[str, str | None] = {}
    for field, value in options:
        if field == "sbatch" or value is None or value is False:
            continue
        name = OPTION_NAMES.get(field, field.replace("_", "-"))
        if field == "memory_per_cpu":
            value = _megabytes(value)
        elif field == "time_min":
            value = format_duration(parse_duration(value))
        found[name] = None if value is True else str(value)
    for name, value in options.sbatch.items():
        if value is not False:
            found[name] = None if value is True else str(value)
    return found


def _dropped(options: SlurmOptions) -> set[str]:
    """The options that are given as false or null: there is to be none of them."""
    given = {name: getattr(options, name) for name in options.model_fields_set - {"sbatch"}}
    names = {OPTION_NAMES.get(name, name.replace("_", "-")): given[name] for name in given}
    return {name for name, value in {**names, **options.sbatch}.items() if value in (None, False)}


def _megabytes(size: int) -> str:
    """Bytes as Slurm counts memory: whole megabytes, rounded up."""
    return f"{-(-size // 2**20)}M"
