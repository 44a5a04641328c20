"""The plan: everything about a run that is decided before anything is submitted."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from hpcml import __version__
from hpcml.errors import UserError
from hpcml.files import expanded, root_of_cell
from hpcml.plan.arrays import Part, split
from hpcml.plan.container import Container, choose_container
from hpcml.plan.inputs import check_inputs
from hpcml.plan.resources import Resources, check_fit
from hpcml.plan.slurm import Directives, directives
from hpcml.plan.snapshot import Snapshot, project_root, take
from hpcml.plan.volcano import Job, Pod, jobs_of, pod_of
from hpcml.recipe.cell import Cell
from hpcml.recipe.halving import rungs
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.schema import Spending
from hpcml.recipe.search import search_of
from hpcml.recipe.stages import Reference, Stages
from hpcml.recipe.sweep import expand
from hpcml.site.schema import Site
from hpcml.site.search import FoundSite


@dataclass(frozen=True)
class Plan:
    """A recipe on a site. Immutable: it is compiled once, then only executed.

    ``digest`` identifies the cells, and with them the run: the same cells are the same run, on
    whatever resources they get. ``layout`` says how processes share the work of a cell; a
    submission has it, and it wins over what the cells say. ``needs`` are the stages before it.
    ``project`` is the folder that a snapshot is taken of, and ``directory`` the recipe's folder in
    it. ``root`` is the runs root, ``folder`` where this run lies in it. ``halving`` says what the
    rungs have, see :func:`hpcml.recipe.halving.rungs`, and ``search`` what the rounds have, see
    :func:`hpcml.recipe.search.search_of`.
    """

    name: str
    kind: str
    digest: str
    cells: tuple[Cell, ...]
    stage: str | None
    needs: tuple[Plan, ...]
    swept: tuple[str, ...]
    objective: dict[str, str] | None
    halving: dict[str, Any] | None
    search: dict[str, Any] | None
    resources: Resources
    pack: int
    workers: int
    max_running: int | None
    budget: Spending
    retry: dict[str, int]
    layout: dict[str, Any]
    env_from: tuple[str, ...]
    site: Site
    python: str
    container: Container | None
    pod: Pod | None
    root: Path
    project: Path | None
    directory: str
    code_limit: int
    directives: Directives
    recipe_text: str
    site_text: str
    notes: tuple[str, ...]

    @property
    def run_id(self) -> str:
        """The name of the run's folder."""
        return self.digest[:8]

    @property
    def folder(self) -> Path:
        """Where the run lies."""
        return self.root / self.name / self.run_id

    @property
    def image(self) -> str | None:
        """The image that cells run in."""
        return self.pod.image if self.pod else self.container.image if self.container else None

    @property
    def lead(self) -> int:
        """Seconds between the signal and the end of a job."""
        return lead_of(self.site, self.resources)

    @property
    def chain(self) -> list[int]:
        """The cells of each rung of a halving, or of each round of a search; empty without."""
        cells: list[int] = (self.halving or self.search or {"cells": []})["cells"]
        return cells

    @property
    def host_python(self) -> str:
        """The Python outside of any image."""
        return self.site.python or sys.executable

    @property
    def links(self) -> int:
        """Jobs of a chain; 1 where jobs requeue themselves."""
        return self.site.slurm.links if self.site.slurm.coming_back == "chain" else 1

    def settings(self) -> dict[str, Any]:
        """What the worker of a submission needs to know, beside the cells."""
        return {
            "kind": self.kind,
            "directory": self.directory,
            "resources": asdict(self.resources),
            "retry": self.retry,
            "layout": self.layout,
            "signal": {"name": self.site.signal.name, "lead": self.lead},
            "node_mtbf": self.site.node_mtbf,
        }

    def document(self) -> dict[str, Any]:
        """The content of ``plan.json``: all but the cells, which have a file of their own."""
        return {
            "digest": self.digest,
            "name": self.name,
            "run_id": self.run_id,
            "cells": len(self.cells),
            "swept": list(self.swept),
            "objective": self.objective,
            **({} if self.halving is None else {"halving": self.halving}),
            **({} if self.search is None else {"search": self.search}),
            **self.settings(),
            "array": {"pack": self.pack, "max_running": self.max_running},
            "env_from": list(self.env_from),
            "needs": [f"{plan.name}/{plan.run_id}" for plan in self.needs],
            "image": self.image,
            "workers": self.workers,
            "python": self.python,
            "container": TypeAdapter(Container | None).dump_python(self.container, mode="json"),
            "pod": TypeAdapter(Pod | None).dump_python(self.pod, mode="json"),
            "directives": [list(directive) for directive in self.directives],
            "project": None if self.project is None else str(self.project),
            "code_limit": self.code_limit,
            "stage": self.stage,
            "scheduler": self.site.scheduler,
            "site": self.site.model_dump(mode="json"),
            "hpcml_version": __version__,
        }


@dataclass(frozen=True)
class Submission:
    """Some cells of a plan, to be given to the scheduler as tasks of ``plan.pack`` cells each.

    ``rung`` is the rung of a halving, or the round of a search, from 1. In a later rung ``indices``
    are places, and who has them is decided when the rung begins. In a round they are cells, and
    what these try is decided then.

    With several workers, a cell has as many tasks, one after another; ``first_worker`` is the
    number of the first.
    """

    plan: Plan
    number: int
    indices: tuple[int, ...]
    snapshot: Snapshot
    first_worker: int = 0
    rung: int | None = None

    @property
    def tasks(self) -> int:
        """Number of tasks."""
        return -(-len(self.indices) // self.plan.pack) * self.plan.workers

    @property
    def code(self) -> str:
        """The folder of its code in the run folder."""
        return f"code/{self.snapshot.digest}"

    @property
    def parts(self) -> tuple[Part, ...]:
        """The arrays that Slurm gets."""
        return split(self.tasks, self.plan.site.slurm.max_array_size, self.plan.max_running)

    @property
    def jobs(self) -> tuple[Job, ...]:
        """The jobs that Volcano gets."""
        plan = self.plan
        return jobs_of(
            plan.name,
            plan.run_id,
            plan.folder,
            self.number,
            plan.site,
            plan.resources.nodes,
            self.tasks,
            plan.max_running,
        )

    def record(self) -> dict[str, Any]:
        """The content of ``submissions/NNN.json``, from which the worker finds its cells."""
        return {
            "cells": ranges(self.indices),
            "pack": self.plan.pack,
            "workers": self.plan.workers,
            "first_worker": self.first_worker,
            "code": self.code,
            "scheduler": self.plan.site.scheduler,
            **({} if self.plan.halving is None else {"rung": self.rung}),
            "settings": self.plan.settings(),
        }


def compile_stages(
    stages: Iterable[LoadedRecipe], found: FoundSite, root: Path | None = None
) -> list[Plan]:
    """The plans of all stages of a recipe, in their order; see :func:`compile_plan`."""
    plans: dict[str | None, Plan] = {}
    for loaded in stages:
        plans[loaded.stage] = compile_plan(
            loaded,
            found,
            root,
            needs={name: plans[name] for name in loaded.needs},
        )
    return list(plans.values())


def compile_plan(
    loaded: LoadedRecipe,
    found: FoundSite,
    root: Path | None = None,
    needs: Mapping[str, Plan] | None = None,
) -> Plan:
    """Decide everything: the cells, their resources, where the run lies.

    Args:
        loaded: the recipe.
        found: the site.
        needs: the plans of the stages that must have succeeded before this one begins.
        root: the runs root; without it ``$HPCML_RUNS``, the site's ``runs``, or ``runs`` here.

    Raises:
        UserError: the recipe asks for something that the site cannot give, or is itself wrong.
    """
    recipe, site = loaded.recipe, found.site
    needs = needs or {}
    # Relative to the runs root, so that a root that was moved still works.
    results = {
        name: Reference(
            f"{plan.name}/{plan.run_id}",
            params={**plan.cells[0].params, **dict.fromkeys(plan.swept)},
            ranked=plan.objective is not None or len(plan.cells) == 1,
        )
        for name, plan in _before(needs).items()
    }
    cells = tuple(expand(loaded, Stages(results)))
    resources = resources_of(loaded)
    options: Directives = ()
    notes = loaded.notes
    if site.scheduler == "local":
        check_fit(resources, recipe.array.pack, site, loaded.document)
    elif site.scheduler == "slurm":
        options, more = directives(loaded, resources, site, lead_of(site, resources))
        notes += more
    missing = [name for name in recipe.env_from if name not in os.environ]
    if missing and site.scheduler != "volcano":
        raise UserError(
            f"{loaded.document.where('env_from')}: env_from: {', '.join(missing)} "
            "not set in this environment; export it before the command"
        )
    check_inputs(loaded, cells, site)
    if recipe.kind == "train" and resources.gpus:
        from hpcml.plan.training.fit import check_memory  # which other recipes don't need

        notes += check_memory(loaded, cells, site, resources)
    runs = runs_root(site, root)
    container = pod = None
    if site.scheduler == "volcano":
        pod = pod_of(loaded, cells, resources, site, runs)
    else:
        container = choose_container(loaded, cells, site, runs)
    project = project_root(loaded.folder.resolve()) if recipe.kind == "command" else None
    objective = recipe.objective
    halving = rungs(recipe, loaded.document, cells)
    search = search_of(recipe, loaded.document)
    # Sorted: writing a list of the sweep in another order is no other experiment.
    identity: list[Any] = [
        recipe.kind,
        sorted(cell.id for cell in cells),
        [plan.digest for plan in needs.values()],
    ]
    if halving is not None:
        # In the order of the sweep, by which a choice names the cells.
        identity += [halving, [cell.id for cell in cells]]
    if search is not None:
        identity += [search, [cell.id for cell in cells]]
    content = json.dumps(identity, separators=(",", ":"))
    return Plan(
        name=recipe.name,
        kind=recipe.kind,
        digest=hashlib.sha256(content.encode()).hexdigest(),
        cells=cells,
        stage=loaded.stage,
        needs=tuple(needs.values()),
        swept=cells[0].names,
        halving=halving,
        search=search,
        objective={"metric": objective.metric, "mode": objective.mode} if objective else None,
        resources=resources,
        pack=recipe.array.pack,
        workers=recipe.infer.workers if recipe.infer else 1,
        max_running=recipe.array.max_running,
        budget=recipe.budget,
        retry=recipe.retry.model_dump(),
        layout=dict(cells[0].layout),
        env_from=tuple(recipe.env_from),
        site=site,
        python=recipe.container.python if recipe.container else site.python or sys.executable,
        container=container,
        pod=pod,
        root=runs,
        project=project,
        directory=os.path.relpath(loaded.folder.resolve(), project) if project else ".",
        code_limit=recipe.code.limit,
        directives=options,
        recipe_text=loaded.text,
        site_text=found.text,
        notes=notes,
    )


def take_snapshot(plan: Plan) -> Snapshot:
    """The code that a submission of ``plan`` would run now."""
    return take(plan.project, plan.code_limit, plan.root)


def ranges(indices: tuple[int, ...]) -> list[list[int]]:
    """Ascending ``indices`` as ``[first, last]`` pairs: short, also for 100,000 cells."""
    pairs: list[list[int]] = []
    for index in indices:
        if pairs and pairs[-1][1] == index - 1:
            pairs[-1][1] = index
        else:
            pairs.append([index, index])
    return pairs


def _before(needs: Mapping[str, Plan]) -> dict[str, Plan]:
    """The stages that have succeeded when those of ``needs`` have, by name."""
    found = dict(needs)
    for plan in needs.values():
        found |= _before({other.stage: other for other in plan.needs if other.stage is not None})
    return found


# Slurm looks at times now and then, so that a signal comes up to so many seconds early.
_EARLY = 30


def lead_of(site: Site, resources: Resources) -> int:
    """Seconds between the signal and the end of a job: the site's, or less in a short job.

    There it is half of the time that the job surely has, so that it gets some work done before.
    """
    lead, time = site.signal.lead, resources.time
    if time is None:
        return lead
    sure = time - _EARLY if site.scheduler == "slurm" and time >= 2 * _EARLY else time
    return min(lead, sure // 2)


def resources_of(loaded: LoadedRecipe) -> Resources:
    """What a cell of a recipe gets, with every default decided."""
    asked = loaded.recipe.resources
    return Resources(
        nodes=asked.nodes,
        processes=asked.processes or (1 if loaded.recipe.infer else asked.gpus) or 1,
        cpus=asked.cpus,
        gpus=asked.gpus,
        memory=asked.memory,
        time=asked.time,
    )


def runs_root(site: Site, root: Path | None) -> Path:
    """The runs root: `root` if given, `$HPCML_RUNS`, the site's, that of the cell in which the
    command is given, or `runs` in this folder.
    """
    if root is None:
        if named := os.environ.get("HPCML_RUNS"):
            root = expanded(named, "$HPCML_RUNS")
        else:
            default = str(root_of_cell() or "runs")
            root = expanded(site.runs or default, f"site {site.name}: runs")
    if ":" in str(root.absolute()):
        raise UserError(
            f"{root.absolute()}: the path of the runs root has a ':' in it, where PYTHONPATH "
            "would end; choose another by --root"
        )
    # Containers are told the path, and ".." leads elsewhere where a folder above is not there.
    return root.resolve() if ".." in root.parts else root.absolute()
