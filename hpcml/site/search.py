"""Finding the site: by name, by path, or by the name of this host."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

from hpcml import resources
from hpcml.errors import UserError
from hpcml.files import is_file
from hpcml.recipe.problems import Problems, did_you_mean
from hpcml.recipe.validation import checked
from hpcml.recipe.yaml import load_yaml
from hpcml.site.schema import Site

DEFAULT = "local"
_OF_ONE_SCHEDULER = {"machine": "local", "slurm": "slurm", "volcano": "volcano"}


@dataclass(frozen=True)
class FoundSite:
    """A site, the file it came from, and that file's text."""

    site: Site
    path: Path
    text: str


def search_path() -> list[Path]:
    """The folders with site files: the project's, the user's, the machine's, hpcml's own."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return [
        Path("site_configs").absolute(),
        config / "hpcml" / "sites",
        Path("/etc/hpcml/sites"),
        resources.folder("site_configs"),
    ]


def site_files() -> dict[str, Path]:
    """The site files by name; the first folder of the search path that has a name wins."""
    files: dict[str, Path] = {}
    for folder in search_path():
        for path in sorted(folder.glob("*.yaml")):
            files.setdefault(path.stem, path)
    return files


def find_site(name: str | None = None) -> FoundSite:
    """The site to use.

    Args:
        name: a site's name or the path of a site file. Without it ``$HPCML_SITE`` decides, then
            the first site whose ``match`` fits this host's name, then ``local``.

    Raises:
        UserError: there is no such site, or its file has a mistake.
    """
    said = "--site " if name else "$HPCML_SITE="
    name = name or os.environ.get("HPCML_SITE") or None
    files = site_files()
    if name is None:
        host = socket.gethostname()
        for path in files.values():
            found = load_site(path)
            if found.site.match and re.fullmatch(found.site.match, host):
                return found
        return load_site(files[DEFAULT])
    if name in files:
        return load_site(files[name])
    if "/" in name or name.endswith((".yaml", ".yml")):
        return load_site(Path(name))
    raise UserError(
        f"{said}{name}: no such site{did_you_mean(name, files)}\n"
        f"Sites are looked for in {', '.join(str(folder) for folder in search_path())}"
    )


def load_site(path: Path) -> FoundSite:
    """Read one site file.

    Raises:
        UserError: with file, line and key of every mistake.
    """
    document = load_yaml(path)
    problems = Problems(document)
    site = checked(Site, document.data, problems)
    if site is not None:
        _check_match(site, problems)
        for key, scheduler in _OF_ONE_SCHEDULER.items():
            if site.scheduler != scheduler and document.data.get(key):
                problems.add(
                    (key,),
                    f"the scheduler is {site.scheduler}, so it would not be used: leave it out, or "
                    f"set scheduler: {scheduler}",
                )
        _check_container(site, problems)
        if site.scheduler == "volcano":
            _check_volcano(site, problems)
        site = _with_template(site, path.resolve().parent, problems)
    problems.raise_any()
    assert site is not None
    return FoundSite(site, path, document.text)


def _check_match(site: Site, problems: Problems) -> None:
    try:
        re.compile(site.match or "")
    except re.error as error:
        problems.add(("match",), f"not a regular expression: {error}")


def _check_container(site: Site, problems: Problems) -> None:
    pyxis = site.container is not None and site.container.runtime == "pyxis"
    if pyxis and site.scheduler != "slurm":
        problems.add(
            ("container", "runtime"),
            f"pyxis is a plugin of Slurm, and the scheduler is {site.scheduler}; "
            "use apptainer or singularity",
        )


def _check_volcano(site: Site, problems: Problems) -> None:
    if "name" in site.signal.model_fields_set and site.signal.name != "TERM":
        problems.add(("signal", "name"), "Kubernetes sends TERM; leave the key out")
    if site.container is not None:
        problems.add(
            ("container",),
            "on Kubernetes a recipe's image is the pod's; leave the block out, and say what pods "
            "see in volcano.volumes",
        )
    known = [partition.name for partition in site.partitions]
    for name in site.volcano.pools:
        if name not in known:
            problems.add(
                ("volcano", "pools", name),
                f"partitions has no {name} (it has {', '.join(known) or 'none'})",
            )
    if site.python is None:
        problems.add(
            ("python",),
            "this key is missing: the Python of the images, such as python3; a recipe's "
            "container.python wins",
        )


def _with_template(site: Site, folder: Path, problems: Problems) -> Site:
    """The site with the absolute paths of its templates."""
    if site.template is not None:
        path = _template(folder / site.template, ("template",), problems)
        site = site.model_copy(update={"template": path})
    if site.volcano.template is not None:
        path = _template(folder / site.volcano.template, ("volcano", "template"), problems)
        volcano = site.volcano.model_copy(update={"template": path})
        site = site.model_copy(update={"volcano": volcano})
    return site


def _template(path: Path, place: tuple[str, ...], problems: Problems) -> str:
    try:
        if not is_file(path):
            problems.add(place, f"there is no file {path}")
    except UserError as error:
        problems.add(place, str(error))
    return str(path)
