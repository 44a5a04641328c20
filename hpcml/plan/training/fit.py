"""Whether the trainings of a recipe fit the GPUs that they will get."""

from __future__ import annotations

from collections.abc import Sequence

from hpcml.errors import UserError
from hpcml.plan.partitions import choose_partition
from hpcml.plan.resources import Resources
from hpcml.plan.training.kinds import kinds
from hpcml.plan.training.memory import gib, largest, verdict
from hpcml.plan.training.model import UnknownModel
from hpcml.recipe.cell import Cell
from hpcml.recipe.load import LoadedRecipe
from hpcml.site.schema import Site


def check_memory(
    loaded: LoadedRecipe, cells: Sequence[Cell], site: Site, resources: Resources
) -> tuple[str, ...]:
    """Say whether the largest training fits, where the site says what memory a GPU has.

    Activations are an estimate, so that a training which should not fit is only noted.

    Returns:
        A note, or nothing where it isn't known.

    Raises:
        UserError: weights, gradients and optimizer states alone are more than the GPU has.
    """
    if site.scheduler == "local":
        return ()
    partition = choose_partition(loaded, resources, site)
    if partition is None or partition.gpu_memory is None:
        return ()
    try:
        found = kinds(loaded, cells, resources.nodes * resources.processes, heavy=False)
    except UnknownModel:
        return ()
    room = partition.gpu_memory
    needs = [
        (kind, largest(kind.training, kind.layout))
        for kind in found
        if kind.training.model.layers % (kind.layout.pipeline * kind.layout.virtual) == 0
    ]
    if not needs:
        return ()
    kind, most = max(needs, key=lambda each: each[1].states)
    if most.states > room:
        which = ", ".join(f"{name}={value}" for name, value in kind.tells.items())
        raise UserError(
            f"{loaded.document.where('train')}: train: {kind.layout.engine} "
            f"({kind.layout.words()}) needs {gib(most.states)} GiB for weights, gradients and "
            f"optimizer states alone, and a GPU of partition {partition.name} has {gib(room)} GiB"
            f"{f' (in the cell with {which})' if which else ''}; hpcml plan {loaded.path} shows "
            "the layouts that fit"
        )
    fullest = max((needed for _, needed in needs), key=lambda needed: needed.total)
    more = f" (the largest of {len(found)} models and layouts)" if len(found) > 1 else ""
    return (f"memory {verdict(fullest, room)}{more}",)
