"""What a cell gets, and whether the site has it."""

from __future__ import annotations

from dataclasses import dataclass

from hpcml.errors import UserError
from hpcml.recipe.units import format_memory
from hpcml.recipe.yaml import Document
from hpcml.site import machine
from hpcml.site.schema import Site


@dataclass(frozen=True)
class Resources:
    """What one cell gets, with every default decided.

    ``processes``, ``gpus`` and ``memory`` (bytes) are per node, ``cpus`` per process, ``time``
    in seconds; None is no limit.
    """

    nodes: int
    processes: int
    cpus: int
    gpus: int
    memory: int | None
    time: int | None


def check_fit(resources: Resources, pack: int, site: Site, document: Document) -> None:
    """Refuse what would wait for ever.

    More processes than cores only make a machine slow, so they are allowed; GPUs and memory that
    are not there are not.

    Raises:
        UserError: the site cannot give what one task of ``pack`` cells asks for.
    """

    def refuse(key: str, asked: str, has: str) -> None:
        together = f" for {pack} cells packed into one task" if pack > 1 else ""
        raise UserError(
            f"{document.where(f'resources.{key}')}: resources.{key}: asks for {asked}{together}, "
            f"and site {site.name} has {has}; change the recipe or give --set resources.{key}=…"
        )

    if resources.nodes > 1:
        refuse("nodes", f"{resources.nodes} nodes", "one machine")
    if resources.gpus and resources.gpus * pack > len(gpus(site)):
        refuse("gpus", f"{resources.gpus * pack} GPUs", f"{len(gpus(site)) or 'none'}")
    if resources.memory:
        has = site.machine.memory or machine.memory()
        if resources.memory * pack > has:
            # Whole megabytes, since nobody reads the bytes of an installed memory.
            refuse("memory", format_memory(resources.memory * pack), f"{has // 2**20}M")


def gpus(site: Site) -> list[str]:
    """The GPUs that a local site may use."""
    found = machine.gpus()
    return found if site.machine.gpus is None else found[: site.machine.gpus]


def slots(resources: Resources, pack: int, site: Site) -> int:
    """How many tasks a local site runs at a time: as many as fit, and at least one."""
    cores = (site.machine.cpus or machine.cores()) // (resources.processes * resources.cpus * pack)
    fits = [cores]
    if resources.gpus:
        fits.append(len(gpus(site)) // (resources.gpus * pack))
    if resources.memory:
        has = site.machine.memory or machine.memory()
        fits.append(has // (resources.memory * pack))
    return max(1, min(fits))
