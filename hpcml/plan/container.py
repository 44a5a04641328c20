"""The image that cells run in, and what they see of the host."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcml.recipe.cell import Cell
from hpcml.recipe.container import Bind, parse_bind
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.problems import Problems, did_you_mean
from hpcml.site.images import known_images
from hpcml.site.schema import Container as SiteContainer
from hpcml.site.schema import Site

# What Apptainer fetches by itself.
_FETCHED = ("docker://", "oras://", "library://")
# A mount of pyxis becomes a line of a table whose fields spaces separate; nothing can be quoted.
_PYXIS_PATH = re.compile(r"[\w./@%+=-]+")
_REFERENCE = re.compile(r"[\w./@:#+-]+")


@dataclass(frozen=True)
class Container:
    """An image on a site.

    Attributes:
        runtime: what starts it.
        image: its path or its name, as the runtime takes it.
        python: its Python.
        binds: what it sees of the host, outer folders first; the runs root is among them.
        env: variables that are set inside, beside those of the job.
        gpu: the runtime's option for GPUs, without its dashes, or None.
        options: further words of the command line, trusted.
        keep: names of variables of the job that must reach the inside.
    """

    runtime: str
    image: str
    python: str
    binds: tuple[Bind, ...]
    env: dict[str, str]
    gpu: str | None
    options: tuple[str, ...]
    keep: tuple[str, ...]


def choose_container(
    loaded: LoadedRecipe, cells: Sequence[Cell], site: Site, root: Path
) -> Container | None:
    """The recipe's image on ``site``; None where the recipe has none.

    Args:
        loaded: the recipe.
        cells: its cells; what they are trained on is bound too.
        site: the site.
        root: the runs root, which is bound so that it can be written.

    Raises:
        UserError: the site has no containers, the image is not there, or a path cannot be bound.
    """
    wanted, settings = loaded.recipe.container, site.container
    if wanted is None:
        return None
    problems = Problems(loaded.document)
    if settings is None:
        problems.add(
            ("container",),
            f"site {site.name} has no container runtime; leave the block out, or name another "
            "site (an admin adds one by container.runtime; see docs/containers.md)",
        )
        problems.raise_any()
        raise AssertionError("unreachable")
    image = _image(wanted.image, settings, problems)
    theirs = _site_binds(site.name, settings.binds, problems)
    binds = [*theirs, *map(parse_bind, wanted.binds)]
    if site.scheduler == "local":
        if not site.setup and "PATH" not in site.env and not shutil.which(settings.runtime):
            problems.add(("container",), f"there is no {settings.runtime} on this machine")
        for position, bind in enumerate(binds, start=-len(theirs)):
            if not os.path.exists(bind.source):
                whose = f" (a bind of site {site.name})" if position < 0 else ""
                problems.add(
                    ("container",) if position < 0 else ("container", "binds", position),
                    f"there is no {bind.source} on this machine{whose}",
                )
    # What is needed comes first, and where it is bound by hand, that holds.
    chosen = {bind.destination: bind for bind in read_by(loaded, cells)}
    chosen.update({bind.destination: bind for bind in binds})
    chosen[str(root)] = Bind(str(root), str(root))
    if settings.runtime == "pyxis":
        _check_pyxis(chosen.values(), problems)
    problems.raise_any()
    gpu = settings.gpu if settings.runtime != "pyxis" and settings.gpu != "none" else None
    return Container(
        runtime=settings.runtime,
        image=image,
        python=wanted.python,
        binds=tuple(sorted(chosen.values(), key=lambda bind: bind.destination.count("/"))),
        env={**settings.env, **wanted.env},
        gpu=gpu if loaded.recipe.resources.gpus else None,
        options=tuple(settings.options),
        keep=tuple(dict.fromkeys([*site.env, *loaded.recipe.env_from])),
    )


def read_by(loaded: LoadedRecipe, cells: Sequence[Cell]) -> list[Bind]:
    """What the cells of a training or an inference read and write outside of the runs root."""
    if loaded.recipe.train:
        return _inputs(cells)
    return _of_inference(cells) if loaded.recipe.infer else []


def _site_binds(site: str, texts: Iterable[str], problems: Problems) -> list[Bind]:
    binds = []
    for text in texts:
        try:
            binds.append(parse_bind(os.path.expandvars(text)))
        except ValueError as error:  # a variable is not set
            problems.add(("container",), f"site {site} binds {text}: {error}")
    return binds


def _image(name: str, settings: SiteContainer, problems: Problems) -> str:
    """The image as the runtime takes it; records a problem where it is none."""
    place = ("container", "image")
    runtime = settings.runtime
    scheme, separator, reference = name.partition("://")
    if name in known_images():
        return _known(name, settings, problems)
    if runtime == "pyxis":
        if separator and scheme != "docker":
            problems.add(place, f"pyxis takes docker:// or a .sqsh file, not {scheme}://")
            return name
        if name.endswith(".sif"):
            problems.add(place, "pyxis takes a .sqsh file or docker://, not a .sif file")
            return name
        if separator or not (name.startswith("/") or name.endswith(".sqsh")):
            reference = reference if separator else name
            if not _REFERENCE.fullmatch(reference):
                problems.add(place, f"{reference!r} is not registry/name:tag")
            return enroot_reference(reference)
    elif separator:
        if not name.startswith(_FETCHED):
            problems.add(place, f"{runtime} fetches {', '.join(_FETCHED)}, not {scheme}://")
        return name
    return _file(name, settings, problems)


def _known(name: str, settings: SiteContainer, problems: Problems) -> str:
    """The file of an image that hpcml has a definition of; one of just this name goes before."""
    place = ("container", "image")
    file = known_images()[name].file(settings.runtime)
    if settings.images is None:
        problems.add(
            place,
            f"{name} is an image of hpcml's ({file}), and the site has no folder where it could be "
            "(container.images)",
        )
        return name
    folder = _folder(settings.images)
    for path in (os.path.join(folder, name), os.path.join(folder, file)):
        if os.path.exists(path):
            return path
    make = (
        f"docker build -f {name}.Dockerfile …, then hpcml container pull docker://… --as {name}"
        if settings.runtime == "pyxis"
        else f"hpcml container build {name}"
    )
    problems.add(place, f"there is no image {os.path.join(folder, file)}; make it: {make}")
    return name


def _instead(name: str) -> str:
    """What somebody may have meant by a relative path where nothing is."""
    if name.endswith((".sif", ".sqsh")):
        return "; a relative path begins in the site's folder of images (container.images)"
    if "/" in name or ":" in name:
        return f"; to take it from a registry, write docker://{name}"
    return f", and hpcml has no image of this name{did_you_mean(name, known_images())}"


def _folder(images: str) -> str:
    return os.path.expanduser(os.path.expandvars(images))


def _file(name: str, settings: SiteContainer, problems: Problems) -> str:
    place = ("container", "image")
    images = _folder(settings.images) if settings.images else None
    if not os.path.isabs(name) and images is None:
        hint = "" if settings.runtime == "pyxis" else f", or docker://{name} to fetch it"
        problems.add(
            place,
            f"{name} is a relative path, and the site has no folder of images "
            f"(container.images); give an absolute path{hint}",
        )
        return name
    path = os.path.join(images or "/", name)
    if not os.path.exists(path):
        hint = "" if os.path.isabs(name) else _instead(name)
        problems.add(place, f"there is no image {path}{hint}")
    elif settings.runtime == "pyxis" and os.path.isdir(path):
        problems.add(place, f"pyxis takes a .sqsh file or docker://, and {path} is a folder")
    return path


def enroot_reference(reference: str) -> str:
    """``nvcr.io/nvidia/pytorch:25.06`` as enroot writes it: with ``#`` after the registry."""
    registry, slash, rest = reference.partition("/")
    known = "." in registry or ":" in registry or registry == "localhost"
    return f"{registry}#{rest}" if slash and known and "#" not in reference else reference


def _of_inference(cells: Sequence[Cell]) -> list[Bind]:
    """What an inference reads, and the folder of its output."""
    found: set[str] = set()
    outputs: set[str] = set()
    for cell in cells:
        payload = cell.payload
        found |= {path for path in (payload["model"], payload["adapter"]) if path}
        found |= {_fixed_part(pattern) for pattern in payload["input"]["files"]}
        if payload["output"]["path"]:
            outputs.add(os.path.dirname(payload["output"]["path"]))
    found = {path for path in found if "\0" not in path and path not in outputs}
    return [*_seen(found), *(Bind(folder, folder) for folder in outputs)]


def _inputs(cells: Sequence[Cell]) -> list[Bind]:
    """What a training reads, to be seen inside where it lies outside."""
    found: set[str] = set()
    for cell in cells:
        model, data = cell.payload["model"], cell.payload["data"]
        for folder in (model, data["tokenizer"]):
            # A stage's result, which is named by a token, lies in the runs root.
            if folder and "\0" not in folder:
                found.add(folder)
        for pattern in data["files"]:
            if "\0" not in pattern:
                found.add(_fixed_part(pattern))
    return _seen(found)


def _seen(found: set[str]) -> list[Bind]:
    """Binds of files and folders, and of what links in them lead to."""
    for folder in list(found):
        if os.path.isdir(folder):
            # A model in a cache of Hugging Face's hub is links to files beside it.
            links = (entry.path for entry in os.scandir(folder) if entry.is_symlink())
            found |= {os.path.dirname(os.path.realpath(link)) for link in links}
    return [
        Bind(folder, folder, read_only=True)
        for folder in sorted(found)
        if os.path.exists(folder)
        and folder != "/"
        and not any(folder.startswith(f"{outer}/") for outer in found)
    ]


def _fixed_part(pattern: str) -> str:
    """The file that is named, or the folder above the first wildcard."""
    fixed = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return pattern if fixed == pattern else os.path.dirname(fixed)


def _check_pyxis(binds: Iterable[Bind], problems: Problems) -> None:
    for bind in binds:
        for path in {bind.source, bind.destination}:
            if not _PYXIS_PATH.fullmatch(path):
                problems.add(
                    ("container", "binds"),
                    f"pyxis cannot mount {path!r}: it has no way of quoting, and takes letters, "
                    "digits and . / @ % + = _ - only; choose another path (for runs by --root)",
                )
