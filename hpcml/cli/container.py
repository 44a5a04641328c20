"""`hpcml container`: the images that cells run in."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hpcml.cli import completion
from hpcml.cli.options import root_option
from hpcml.errors import UserError
from hpcml.files import is_file, plain_errors

if TYPE_CHECKING:
    from hpcml.plan import Plan
    from hpcml.recipe.load import LoadedRecipe
    from hpcml.runs.folder import RunFolder
    from hpcml.runs.status import CellState
    from hpcml.site.images import ImageFile
    from hpcml.site.schema import Site
    from hpcml.site.search import FoundSite

site_option = click.option(
    "--site",
    shell_complete=completion.sites,
    help="Whose images: a site's name or file. [default: this host's, or local]",
)
set_option = click.option(
    "--set",
    "settings",
    multiple=True,
    metavar="KEY=VALUE",
    help="Change a key of the job, such as resources.time=4h or slurm.partition=cpu.",
)
here_option = click.option(
    "--here", is_flag=True, help="On this machine, not as a job of the site."
)
force_option = click.option("--force", is_flag=True, help="Replace an image that is there already.")


@click.group("container")
def command() -> None:
    """List, build, fetch and check the images that cells run in."""


@command.command("list")
@site_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def list_images(site: str | None, as_json: bool) -> None:
    """List the images that hpcml has definitions of, and those in the site's folder."""
    from hpcml.site.images import files_of, folder_of_images, known_images
    from hpcml.site.search import find_site

    found = find_site(site).site
    settings = found.container
    there: dict[str, ImageFile] = {}
    folder = None
    if settings is not None and settings.images is not None:
        folder = folder_of_images(settings, found.name)
        there = files_of(folder)
    images = [
        (image, there.pop(image.file(settings.runtime), None) if settings else None)
        for image in known_images().values()
    ]
    if as_json:
        document = {
            "site": found.name,
            "folder": str(folder) if folder else None,
            "images": [{**image.model_dump(), "file": _described(file)} for image, file in images],
            "others": [_described(file) for file in there.values()],
        }
        click.echo(json.dumps(document, indent=2))
        return
    for image, file in images:
        state = _size_and_day(file) if file else "not there"
        click.echo(f"{image.name:<10} {image.tag:<12} {state:<24} {', '.join(image.serves)}")
        versions = ", ".join(f"{name} {version}" for name, version in image.versions.items())
        click.echo(click.style(f"{'':<10} {versions}\n{'':<10} from {image.base}", dim=True))
    for name, file in there.items():
        click.echo(f"{name}: {_size_and_day(file)}")
    has = f"images of site {found.name} lie in {folder}"
    has_none = f"site {found.name} has no folder of images (container.images)"
    click.echo(has if folder else has_none, err=True)


@command.command("build")
@click.argument("name")
@site_option
@click.option(
    "--base",
    help="Begin with another base: the path of an image, or docker://mirror.example.org/name:tag.",
)
@force_option
@here_option
@set_option
@root_option
@click.pass_context
def build(
    context: click.Context,
    name: str,
    site: str | None,
    base: str | None,
    force: bool,
    here: bool,
    settings: tuple[str, ...],
    root: Path | None,
) -> None:
    """Build the image NAME from its definition, into the site's folder of images, as a job.

    The path of the image is printed. Exit code 1: the build failed, and there is no image.
    """
    from hpcml.site.images import folder_of_images, known_image, with_base
    from hpcml.site.search import find_site

    image, found = known_image(name), find_site(site)
    runtime = _runtime(found.site)
    if runtime == "pyxis":
        raise UserError(
            f"enroot builds no images: build {image.definition.with_suffix('.Dockerfile')} where "
            "there is Docker or Podman, push it to a registry, and fetch it from there: "
            f"hpcml container pull docker://REGISTRY/{name}:{image.tag} --as {name}"
        )
    target = folder_of_images(found.site.container, found.site.name) / image.file(runtime)
    definition = image.definition.read_text(encoding="utf-8")
    if base is not None:
        definition = with_base(definition, base)
    file = f"{name}.def"
    context.exit(_make(found, target, file, {file: definition}, force, here, settings, root))


@command.command("pull")
@click.argument("source")
@click.option("--as", "name", help="Take it as this image of `hpcml container list`.")
@site_option
@force_option
@here_option
@set_option
@root_option
@click.pass_context
def pull(
    context: click.Context,
    source: str,
    name: str | None,
    site: str | None,
    force: bool,
    here: bool,
    settings: tuple[str, ...],
    root: Path | None,
) -> None:
    """Fetch an image into the site's folder of images, as a job.

    SOURCE is docker://registry/name:tag, or the short name of an image, whose base is fetched. The
    path of the image is printed. Exit code 1: it cannot be had.
    """
    from hpcml.site.images import file_of_reference, folder_of_images, known_image
    from hpcml.site.search import find_site

    found = find_site(site)
    runtime = _runtime(found.site)
    if "://" not in source:
        source = f"docker://{known_image(source).base}"
    if not source.startswith(
        "docker://" if runtime == "pyxis" else ("docker://", "oras://", "library://")
    ):
        raise UserError(f"{source}: give docker://registry/name:tag")
    file = known_image(name).file(runtime) if name else file_of_reference(source, runtime)
    target = folder_of_images(found.site.container, found.site.name) / file
    if runtime == "pyxis":
        from hpcml.plan.container import enroot_reference

        source = f"docker://{enroot_reference(source.removeprefix('docker://'))}"
    context.exit(_make(found, target, source, {}, force, here, settings, root))


@command.command("check")
@click.argument("image", required=False)
@click.option(
    "--recipe",
    type=click.Path(path_type=Path),
    help="Look for exactly what this recipe needs, with its GPUs; its own image without IMAGE.",
)
@site_option
@click.option(
    "--gpus", type=click.IntRange(min=0), help="GPUs. [default: all of a node, or the recipe's]"
)
@set_option
@root_option
@click.pass_context
def check(
    context: click.Context,
    image: str | None,
    recipe: Path | None,
    site: str | None,
    gpus: int | None,
    settings: tuple[str, ...],
    root: Path | None,
) -> None:
    """Look into an image on a node: can it do what recipes need; exit code 1 if it cannot.

    IMAGE is what a recipe may have as container.image. A short job is submitted. It is cancelled,
    and its files are removed, when the command ends.
    """
    from hpcml.recipe.load import load_stages
    from hpcml.site.search import find_site

    found = find_site(site)
    if recipe is None:
        if image is None:
            raise UserError("give an IMAGE, or a --recipe that has one")
        parts: list[list[LoadedRecipe]] = [[]]
    else:
        # Stages may have images of their own.
        groups: dict[str, list[LoadedRecipe]] = {}
        for loaded in load_stages(recipe):
            key = json.dumps(None if image else loaded.document.data.get("container"))
            groups.setdefault(key, []).append(loaded)
        parts = list(groups.values())
    good = True
    for stages in parts:
        good &= _check(found, image, stages, gpus, settings, root)
    context.exit(0 if good else 1)


def _check(
    found: FoundSite,
    image: str | None,
    stages: list[LoadedRecipe],
    gpus: int | None,
    settings: tuple[str, ...],
    root: Path | None,
) -> bool:
    """Look into one image, for some stages of a recipe or by itself; whether it will do."""
    from hpcml.cli.site import ended_by_signals, print_checks
    from hpcml.launch.errand import errand
    from hpcml.plan.plan import runs_root
    from hpcml.site import image_check
    from hpcml.site.check import Check
    from hpcml.site.images import known_images

    kinds = list(dict.fromkeys(image_check.kind_of(loaded.recipe) for loaded in stages))
    required = bool(stages) or image in known_images()
    if image is not None and not stages:
        kinds = known_images()[image].serves if required else list(image_check.NEEDS)
    job = _probe(found.site, image, stages, gpus, image_check.wanted(kinds))
    folder = runs_root(found.site, root)
    with plain_errors(f"write to {folder}"):
        folder.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=".container-", dir=folder))
    try:
        with ended_by_signals(), errand(job, found, scratch, settings) as plan:
            reports, cell = _look(plan)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    click.echo(f"{plan.image}" + (f" on {reports[0]['host']}" if reports else ""))
    if not reports:
        return print_checks([Check("start", False, _no_report(cell))])
    resources = plan.resources
    seen = image_check.checks(reports, kinds, resources.processes, resources.gpus, required)
    return print_checks(seen, max(map(len, [*kinds, "all-reduce"])))


def _probe(
    site: Site,
    image: str | None,
    stages: list[LoadedRecipe],
    gpus: int | None,
    wanted: dict[str, Any],
) -> dict[str, Any]:
    """The recipe of a check: the image, the resources and the options of Slurm of a recipe."""
    mine = stages[0].document.data if stages else {}
    container = {**mine.get("container", {}), **({"image": image} if image else {})}
    if "image" not in container:
        raise UserError("the recipe has no container.image: give an IMAGE")
    asked = max((loaded.recipe.resources.gpus for loaded in stages), default=0)
    count = (asked if stages else _gpus(site)) if gpus is None else gpus
    cpus = max((loaded.recipe.resources.cpus for loaded in stages), default=1)
    python = container.get("python", "python3")
    return {
        "name": "container_check",
        "kind": "command",
        "container": container,
        # On CPUs two processes, so that there is something to add up.
        "resources": {"gpus": count, "processes": count or 2, "cpus": cpus, "time": "10m"},
        "slurm": mine.get("slurm", {}),
        "command": {"run": [python, "-m", "hpcml.worker.image_probe", json.dumps(wanted)]},
    }


def _gpus(site: Site) -> int:
    """The GPUs of a node: of the first kind of nodes that has some."""
    from hpcml.plan.resources import gpus

    if site.scheduler == "local":
        return len(gpus(site))
    return next((partition.gpus for partition in site.partitions if partition.gpus), 0)


def _look(plan: Plan) -> tuple[list[dict[str, Any]], CellState]:
    """Run a check to its end: what the processes reported, and the cell."""
    from hpcml.launch.cluster import PartlySubmitted
    from hpcml.launch.errand import end_errand, run_errand
    from hpcml.runs.folder import RunFolder

    waits = _Waits()
    try:
        cell = run_errand(plan, lambda run, cell: waits.tell(cell), waits.say)
    except BaseException as error:
        # Also after a call of the scheduler without a clear end: there may be a job.
        if (plan.folder / "plan.json").exists():
            end_errand(RunFolder.open(plan.folder))
        if isinstance(error, PartlySubmitted):
            raise UserError(str(error)) from None
        raise
    folder = plan.folder / "cells" / cell.id
    reports = [json.loads(path.read_text()) for path in folder.glob("report.*[0-9].json")]
    if not any(report["rank"] == 0 for report in reports):
        return [], replace(cell, reason=cell.reason or _last_line(plan.folder, folder))
    return sorted(reports, key=lambda report: int(report["rank"])), cell


def _no_report(cell: CellState) -> str:
    return (
        f"nothing was reported from inside the image, the job is {cell.state}: {cell.reason}; the "
        "image needs a Python of 3.9 or newer (container.python)"
    )


def _last_line(run: Path, cell: Path) -> str:
    """The last line that was printed, by the payload or by the batch script."""
    for path in (*sorted(cell.glob("log.*.err")), *sorted(run.glob("tasks/*.err"))):
        lines = path.read_text(errors="replace").strip().splitlines()
        if lines:
            return lines[-1]
    return "it printed nothing"


def _make(
    found: FoundSite,
    target: Path,
    source: str,
    files: dict[str, str],
    force: bool,
    here: bool,
    settings: tuple[str, ...],
    root: Path | None,
) -> int:
    """Run the job that makes the file of an image; returns the exit code."""
    from hpcml.cli import text
    from hpcml.launch.cluster import PartlySubmitted
    from hpcml.launch.errand import errand, run_errand
    from hpcml.runs.find import reference
    from hpcml.runs.folder import RunFolder

    if target.exists() and not force:
        raise UserError(f"{target} is there already; --force makes it anew")
    site = found.site
    if here:
        # What a login node has of a cluster: its environment and its setup lines.
        changes = {"scheduler": "local", "template": None}
        found = replace(found, site=site.model_copy(update=changes))
    runtime = _runtime(site)
    program = "enroot" if runtime == "pyxis" else runtime
    python = site.python or sys.executable
    job = {
        "name": "container_build" if files else "container_pull",
        "kind": "command",
        # Each time a run of its own: whether the image is there is seen in its folder.
        "params": {"image": target.name, "begun": datetime.now().isoformat()},
        "resources": {"cpus": 4, "time": "2h"},
        "command": {
            "run": [python, "-m", "hpcml.worker.image", program, source, str(target.absolute())]
        },
    }
    waits = _Waits()
    folder: Path | None = None
    try:
        with errand(job, found, root, settings, files) as plan:
            folder = plan.folder
            cell = run_errand(plan, waits.show, waits.say)
    except PartlySubmitted as error:
        click.echo(f"hpcml: {error}", err=True)
        return 1
    except KeyboardInterrupt:
        if found.site.scheduler != "local" and folder is not None and is_file(folder / "plan.json"):
            name = reference(RunFolder.open(folder))
            waits.say(
                f"no longer followed; the job goes on. hpcml logs {name} 0 -f shows it, "
                f"hpcml cancel {name} ends it"
            )
        raise
    if cell.state != "done":
        waits.say(f"{target} was not made: {text.one_line(cell.reason) or cell.state}")
        return 1
    click.echo(target)
    return 0


class _Waits:
    """Tells on standard error what is waited for, and what the job prints."""

    def __init__(self) -> None:
        self._told: str | None = None
        self._shown: dict[Path, int] = {}

    def say(self, what: str) -> None:
        """A line for a person."""
        from hpcml.cli import text

        click.echo(f"hpcml: {text.message(what)}", err=True)

    def tell(self, cell: CellState) -> None:
        """Why a job waits, once."""
        if cell.state == "pending" and cell.reason not in (None, self._told):
            self._told = cell.reason
            self.say(f"the job {cell.reason}")

    def show(self, run: RunFolder, cell: CellState) -> None:
        """What was printed since the last call."""
        from hpcml.runs.logs import cell_logs

        self.tell(cell)
        for log in cell_logs(run.cell_dir(cell.id)):
            with log.path.open("rb") as file:
                file.seek(self._shown.get(log.path, 0))
                data = file.read()
            self._shown[log.path] = self._shown.get(log.path, 0) + len(data)
            click.echo(data, nl=False, err=True)


def _runtime(site: Site) -> str:
    """What starts images at a site.

    Raises:
        UserError: nothing does, or a registry has them.
    """
    if site.scheduler == "volcano":
        raise UserError(
            "Kubernetes takes images from a registry: build a Dockerfile of hpcml's containers "
            "where there is Docker or Podman, push the image, and name it in container.image"
        )
    if site.container is None:
        raise UserError(
            f"site {site.name} has no container runtime; an admin adds one by container.runtime "
            "(docs/containers.md)"
        )
    return site.container.runtime


def _described(file: ImageFile | None) -> dict[str, Any] | None:
    return {**file._asdict(), "path": str(file.path)} if file else None


def _size_and_day(file: ImageFile) -> str:
    from hpcml.recipe.units import format_memory

    day = time.strftime("%Y-%m-%d", time.localtime(file.time))
    return f"{format_memory(file.size // 2**20 * 2**20)}, {day}"
