"""The images that hpcml has definitions of, and the files of images in a site's folder."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml
from pydantic import Field

from hpcml import resources
from hpcml.errors import UserError
from hpcml.files import expanded, plain_errors
from hpcml.recipe.problems import did_you_mean
from hpcml.recipe.validation import Block
from hpcml.site.schema import Container

SUFFIXES = (".sif", ".sqsh")


class Image(Block):
    """An image of ``containers/images.yaml``.

    Attributes:
        name: its short name, which recipes may use.
        description: one line for people.
        tag: changes whenever the definition does.
        base: what it begins with, as a registry calls it.
        source: where the tag of the base is named.
        contains: names and versions of what the base brings.
        adds: names and versions of what the definition installs.
        serves: kinds of recipes with their engines, such as ``train torch``.
    """

    name: str
    description: str
    tag: str
    base: str
    source: str
    contains: dict[str, str] = Field(default_factory=dict)
    adds: dict[str, str] = Field(default_factory=dict)
    serves: list[str]

    @property
    def versions(self) -> dict[str, str]:
        """Names and versions of everything in it that is known."""
        return {**self.contains, **self.adds}

    @property
    def definition(self) -> Path:
        """The file from which Apptainer builds it."""
        return resources.folder("containers") / f"{self.name}.def"

    def file(self, runtime: str) -> str:
        """The name of its file in a folder of images."""
        return f"{self.name}-{self.tag}{suffix(runtime)}"


class ImageFile(NamedTuple):
    """A file in a folder of images: its size in bytes, and its time as ``os.stat`` has it."""

    path: Path
    size: int
    time: float


@lru_cache(maxsize=1)
def known_images() -> Mapping[str, Image]:
    """All images that hpcml has definitions of, by name."""
    path = resources.folder("containers") / "images.yaml"
    # Ours, not a person's: nothing in it needs the lines that load_yaml() keeps.
    data = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    return {name: Image.model_validate({"name": name, **entry}) for name, entry in data.items()}


def known_image(name: str) -> Image:
    """The image of this name.

    Raises:
        UserError: there is none.
    """
    images = known_images()
    if name not in images:
        raise UserError(f"there is no image {name!r} with a definition{did_you_mean(name, images)}")
    return images[name]


def suffix(runtime: str) -> str:
    """How the files of a runtime's images end."""
    return ".sqsh" if runtime == "pyxis" else ".sif"


def folder_of_images(settings: Container | None, site: str) -> Path:
    """The folder of a site's images.

    Raises:
        UserError: the site has none, or a variable in its path is not set.
    """
    if settings is None or settings.images is None:
        raise UserError(
            f"site {site} has no folder of images; add it to the site's file, for example "
            f"container: {{runtime: {settings.runtime if settings else 'apptainer'}, "
            "images: /shared/containers}"
        )
    return expanded(settings.images, f"site {site}: container.images")


def files_of(folder: Path) -> dict[str, ImageFile]:
    """The images in a folder by their names; none where there is no folder.

    Raises:
        UserError: it cannot be read.
    """
    found = {}
    with plain_errors(f"read {folder}"):
        if folder.is_dir():
            for path in sorted(folder.iterdir()):
                if path.suffix in SUFFIXES and not path.name.startswith(".") and path.exists():
                    status = path.stat()
                    found[path.name] = ImageFile(path, status.st_size, status.st_mtime)
    return found


def file_of_reference(reference: str, runtime: str) -> str:
    """The name of the file for an image that is fetched: ``docker://a.b/c/d:1`` is ``d_1.sif``.

    Raises:
        UserError: the reference has no name in it.
    """
    last = reference.rpartition("/")[2].partition("@")[0]
    name, _, tag = last.partition(":")
    if not re.fullmatch(r"[\w.-]+", name) or not re.fullmatch(r"[\w.-]*", tag):
        raise UserError(f"{reference}: this is not docker://registry/name:tag")
    return f"{name}_{tag or 'latest'}{suffix(runtime)}"


def with_base(definition: str, base: str) -> str:
    """The text of a definition that begins with another base.

    Args:
        definition: the text; its first two lines say ``Bootstrap`` and ``From``.
        base: a reference such as ``docker://mirror.example.org/python:3.12``, or the absolute path
            of an image file or of a folder with its files.

    Raises:
        UserError: it is neither.
    """
    scheme, separator, name = base.partition("://")
    if not separator:
        if not base.startswith("/"):
            raise UserError(
                f"--base {base}: give a path that begins with /, or docker://registry/name:tag"
            )
        scheme, name = "localimage", base
    elif scheme not in ("docker", "oras", "library"):
        raise UserError(f"--base {base}: it may begin with docker://, oras:// or library://")
    if re.search(r"[\0-\x1f\x7f]", base) or "{{" in base:
        raise UserError(f"--base {base!r}: this is not the name of an image")
    _, _, rest = definition.partition("\nFrom: ")
    return f"Bootstrap: {scheme}\nFrom: {name}\n{rest.partition(chr(10))[2]}"
