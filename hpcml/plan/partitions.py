"""Which nodes of a cluster a job goes to, by what they have."""

from __future__ import annotations

from hpcml.errors import UserError
from hpcml.plan.resources import Resources
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.slurm import SlurmOptions
from hpcml.recipe.units import format_duration, format_memory
from hpcml.site.schema import Partition, Site


def choose_partition(loaded: LoadedRecipe, resources: Resources, site: Site) -> Partition | None:
    """The partition of a job: the one that is named, or the first that has what it asks for.

    None where the site lists no partitions: the scheduler then decides. Only for Slurm a recipe
    names one.

    Raises:
        UserError: none has it; the message says for each what is missing.
    """
    options = SlurmOptions()
    if site.scheduler == "slurm":
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
        named = loaded.recipe.slurm.partition is not None and not set(names) <= set(known)
        _refuse(loaded, site, lacking, "slurm.partition" if named else "resources")
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


def _refuse(loaded: LoadedRecipe, site: Site, lacking: list[str], key: str = "resources") -> None:
    lines = "\n".join(f"  {line}" for line in lacking)
    raise UserError(
        f"{loaded.document.where(key)}: {key}: no partition of site {site.name} has "
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
