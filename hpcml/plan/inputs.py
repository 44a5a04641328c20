"""Whether what a recipe names is there, before a thousand cells find out that it is not."""

from __future__ import annotations

import glob
import importlib.util
import os
import shutil
import sys
from collections.abc import Iterable, Sequence
from typing import Any

from hpcml.recipe.cell import Cell
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.problems import Problems
from hpcml.site.schema import Site


def check_inputs(loaded: LoadedRecipe, cells: Sequence[Cell], site: Site) -> None:
    """Look for the files, folders and programs that the recipe names.

    Raises:
        UserError: one is missing; the message names its key.
    """
    problems = Problems(loaded.document)
    if loaded.recipe.sweep.search is not None:
        _check_sampler(loaded.recipe.sweep.search.sampler, problems)
    if loaded.recipe.command is not None:
        _check_directory(loaded, site, problems)
    if loaded.recipe.command is not None and loaded.recipe.container is None:
        _check_program(loaded.recipe.command.run[0], site, problems)
    if loaded.recipe.train is not None:
        train = loaded.recipe.train
        texts = [train.model, train.data.tokenizer, *train.data.files]
        varies = any("{{" in text for text in texts if text)
        for payload in _distinct(cells if varies else cells[:1]):
            _check_training(payload, problems)
    if loaded.recipe.infer is not None:
        for cell in cells:
            _check_inference(cell.payload, problems)
            problems.raise_any()
    problems.raise_any()


def _check_sampler(sampler: str, problems: Problems) -> None:
    """The first round is proposed by the Python that submits."""
    needed = ["optuna", *{"cmaes": ["cmaes"], "qmc": ["scipy"]}.get(sampler, [])]
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        problems.add(
            ("sweep", "search"),
            f"{sampler} needs {' and '.join(missing)}, which {sys.executable} does not have: "
            "pip install 'hpcml[search]'",
        )


def _check_directory(loaded: LoadedRecipe, site: Site, problems: Problems) -> None:
    command = loaded.recipe.command
    assert command is not None
    directory = command.directory
    if directory is None or "{{" in directory:
        return
    # An absolute one is of the place where cells run, which may be an image or another machine.
    if os.path.isabs(directory) and (site.scheduler != "local" or loaded.recipe.container):
        return
    if not os.path.isdir(loaded.folder / directory):
        problems.add(("command", "directory"), f"there is no folder {loaded.folder / directory}")


def _check_program(program: str, site: Site, problems: Problems) -> None:
    # Setup lines may change the PATH, and a relative path starts in the snapshot.
    if site.scheduler != "local" or site.setup or "PATH" in site.env:
        return
    if "{{" in program or (os.sep in program and not os.path.isabs(program)):
        return
    if shutil.which(program) is None:
        problems.add(("command", "run", 0), f"there is no program {program!r} on this machine")


def _distinct(cells: Iterable[Cell]) -> list[dict[str, object]]:
    found = {}
    for cell in cells:
        payload = cell.payload
        found[str((payload["model"], payload["data"]))] = payload
    return list(found.values())


def _check_training(payload: dict[str, object], problems: Problems) -> None:
    model, data = payload["model"], payload["data"]
    assert isinstance(data, dict)
    if model is not None and "\0" not in str(model) and not _is_model(str(model)):
        problems.add(("train", "model"), f"{model} is no model folder: it has no config.json")
    tokenizer = data["tokenizer"]
    if tokenizer is not None and "\0" not in tokenizer and not os.path.isdir(tokenizer):
        problems.add(("train", "data", "tokenizer"), f"there is no folder {tokenizer}")
    for position, pattern in enumerate(data["files"]):
        if not glob.glob(pattern, recursive=True):
            problems.add(("train", "data", "files", position), f"no file matches {pattern}")


def _check_inference(payload: dict[str, Any], problems: Problems) -> None:
    model, adapter, source = payload["model"], payload["adapter"], payload["input"]
    if "\0" not in model and not _is_model(model):
        problems.add(("infer", "model"), f"{model} is no model folder: it has no config.json")
    if adapter and "\0" not in adapter and not _has(adapter, "adapter_config.json"):
        problems.add(
            ("infer", "adapter"), f"{adapter} is no adapter: it has no adapter_config.json"
        )
    output = payload["output"]["path"]
    for position, pattern in enumerate(source["files"]):
        if "\0" in pattern:
            continue
        found = [pattern] if os.path.exists(pattern) else glob.glob(pattern, recursive=True)
        if not found:
            problems.add(("infer", "input", "files", position), f"no file matches {pattern}")
        # Nor may the next round read what this one wrote.
        if output and any(_overlap(output, path) for path in [*found, _folder_of(pattern)]):
            problems.add(
                ("infer", "output", "path"),
                f"{output} is the input, or lies in it; choose a place of its own",
            )
            return


def _folder_of(pattern: str) -> str:
    """The folder whose files a pattern takes; of a plain name, the name itself."""
    return os.path.dirname(pattern) if glob.has_magic(pattern) else pattern


def _overlap(output: str, source: str) -> bool:
    first, second = os.path.realpath(output), os.path.realpath(source)
    return os.path.commonpath([first, second]) in (first, second)


def _has(folder: str, name: str) -> bool:
    return os.path.isfile(os.path.join(folder, name))


def _is_model(folder: str) -> bool:
    # A checkpoint of hpcml has the model in a folder of its own.
    places = (folder, os.path.join(folder, "model"))
    return any(os.path.isfile(os.path.join(place, "config.json")) for place in places)
