"""What a plan asks of Slurm: the partition, and the options of its jobs."""

from __future__ import annotations

from typing import Any

from hpcml.errors import UserError
from hpcml.plan.resources import Resources
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.slurm import EXCLUSIVE, OPTION_NAMES, SlurmOptions
from hpcml.recipe.units import format_duration, format_memory, parse_duration
from hpcml.site.schema import Partition, Site

Directives = tuple[tuple[str, str | None], ...]


def choose_partition(loaded: LoadedRecipe, resources: Resources, site: Site) -> Partition | None:
    """The partition of a job: the one that is named, or the first that has what it asks for.

    None where the site lists no partitions: Slurm's default then decides.

    Raises:
        UserError: none has it; the message says for each what is missing.
    """
    options = _merged(loaded.recipe.slurm, site.slurm.options)
    pack = loaded.recipe.array.pack
    known = {partition.name: partition for partition in site.partitions}
    if options.partition is not None:
        if not known:
            return None
        # Slurm takes several names, and starts the job where it can first.
        names = options.partition.split(",")
        lacking = [
            f"{name}: {_lacks(known[name], resources, pack, options) or 'fits'}"
            if name in known
            else f"{name}: there is no such partition (there are {', '.join(known)})"
            for name in names
        ]
        if all(line.endswith(": fits") for line in lacking):
            return known[names[0]]
        _refuse(loaded, site, lacking)
    for partition in site.partitions:
        if not _lacks(partition, resources, pack, options):
            return partition
    if site.partitions:
        _refuse(
            loaded,
            site,
            [f"{p.name}: {_lacks(p, resources, pack, options)}" for p in site.partitions],
        )
    return None


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


def _refuse(loaded: LoadedRecipe, site: Site, lacking: list[str]) -> None:
    lines = "\n".join(f"  {line}" for line in lacking)
    raise UserError(
        f"{loaded.document.where('resources')}: resources: no partition of site {site.name} has "
        f"what a job asks for\n{lines}\nChange resources, or name another partition or site"
    )


def _lacks(
    partition: Partition, resources: Resources, pack: int, options: SlurmOptions
) -> str | None:
    """What the partition lacks, or None if it has everything."""
    cpus = resources.processes * resources.cpus * pack
    if partition.max_nodes is not None and resources.nodes > partition.max_nodes:
        return f"asks for {resources.nodes} nodes, it allows {partition.max_nodes}"
    if cpus > partition.cpus:
        return f"asks for {cpus} cores a node, it has {partition.cpus}"
    if resources.gpus * pack > partition.gpus:
        return f"asks for {resources.gpus * pack} GPUs a node, it has {partition.gpus or 'none'}"
    if resources.gpus and options.gpu_type not in (None, partition.gpu_type):
        return f"asks for {options.gpu_type}, it has {partition.gpu_type or 'another kind'}"
    if resources.memory and resources.memory * pack > partition.memory:
        asked, has = format_memory(resources.memory * pack), format_memory(partition.memory)
        return f"asks for {asked} a node, it has {has}"
    if resources.time and partition.max_time and resources.time > partition.max_time:
        asked, has = format_duration(resources.time), format_duration(partition.max_time)
        return f"asks for {asked}, it allows {has}"
    return None


def _merged(mine: SlurmOptions, theirs: SlurmOptions) -> SlurmOptions:
    given = {name: getattr(mine, name) for name in mine.model_fields_set}
    return theirs.model_copy(update=given)


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
