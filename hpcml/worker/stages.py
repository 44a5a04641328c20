"""Putting the results of earlier stages into a cell, now that they are known.

A plan that names such a result has a token in its place: NUL, the stage's run folder relative to
the runs root, NUL, what of its result (``best.params.learning_rate``), NUL.
"""

import json
import math
import os
import re
from typing import Any, Optional

_TOKEN = re.compile("\0([^\0]*)\0([^\0]*)\0")


class NoResult(Exception):
    """An earlier stage has no such result; the message is for a person."""


def searched(params: "dict[str, Any]") -> "dict[str, Any]":
    """The parameters that a search proposed, as tokens name them."""
    return {f"search.{name}": value for name, value in params.items()}


def complete(
    cell: "dict[str, Any]", root: str, own: "Optional[dict[str, Any]]" = None
) -> "dict[str, Any]":
    """``cell`` with every token in it replaced, see :func:`resolve`; a program's texts stay texts.

    Raises:
        NoResult: as :func:`resolve`.
    """
    found: dict[str, Any] = resolve(cell, root, own)
    payload = found["payload"]
    if payload.get("argv"):
        payload["argv"] = [_text(argument) for argument in payload["argv"]]
    if payload.get("directory") is not None:
        payload["directory"] = _text(payload["directory"])
    if payload.get("env"):
        payload["env"] = {name: _text(value) for name, value in payload["env"].items()}
    return found


def resolve(value: Any, root: str, own: "Optional[dict[str, Any]]" = None) -> Any:
    """``value`` with every token in it, at any depth, replaced.

    A text that is one token becomes the value itself, a number for example; within a longer text
    it becomes text.

    Args:
        value: part of a cell.
        root: the runs root.
        own: what the cell's own run decides, which tokens without a run folder stand for.

    Raises:
        NoResult: a stage has no best cell, or its best cell lacks what is asked for.
    """
    if isinstance(value, dict):
        return {key: resolve(item, root, own) for key, item in value.items()}
    if isinstance(value, list):
        return [resolve(item, root, own) for item in value]
    if not isinstance(value, str) or "\0" not in value:
        return value
    whole = _TOKEN.fullmatch(value)
    if whole:
        return _of_token(whole, root, own)
    return _TOKEN.sub(lambda token: _text(_of_token(token, root, own)), value)


def _of_token(token: "re.Match[str]", root: str, own: "Optional[dict[str, Any]]") -> Any:
    if not token[1]:
        return (own or {})[token[2]]
    return _result(os.path.join(root, token[1]), token[2])


def require(run_dir: str) -> None:
    """Refuse to go on from a stage that is not complete.

    What the scheduler says of its jobs is no answer: it forgets them, counts a cell that failed
    first and was done later as failed, and one that used up its memory in between as well.

    Raises:
        NoResult: cells of the stage are not done.
    """
    with open(os.path.join(run_dir, "plan.json"), encoding="utf-8") as file:
        total: int = json.load(file)["cells"]
    done = sum(
        os.path.exists(os.path.join(folder.path, "result.json"))
        for folder in os.scandir(os.path.join(run_dir, "cells"))
    )
    if done < total:
        raise NoResult(
            f"the stage before is not complete: {total - done} of {total} cells of {run_dir} are "
            "not done"
        )


def best_cell(run_dir: str) -> "dict[str, Any]":
    """The ``result.json`` of the best cell of a run by its objective, the only one without.

    Raises:
        NoResult: no cell has a finite value of the objective.
    """
    with open(os.path.join(run_dir, "plan.json"), encoding="utf-8") as file:
        objective: Optional[dict[str, str]] = json.load(file)["objective"]
    results = list(_results(run_dir))
    if objective is None:
        if len(results) == 1:
            return dict(results[0])
        raise NoResult(
            f"{run_dir} has {len(results)} cells and no objective to choose the best one by"
        )
    sign = -1 if objective["mode"] == "max" else 1
    ranked = []
    for result in results:
        number = result["metrics"].get(objective["metric"])
        if isinstance(number, (int, float)) and math.isfinite(number):
            ranked.append((sign * number, result["index"], result))
    if not ranked:
        raise NoResult(f"{run_dir} has no cell with a value of {objective['metric']}")
    best: dict[str, Any] = min(ranked, key=lambda entry: entry[:2])[2]
    return best


def _results(run_dir: str) -> Any:
    cells = os.path.join(run_dir, "cells")
    for name in os.listdir(cells):
        try:
            with open(os.path.join(cells, name, "result.json"), encoding="utf-8") as file:
                yield json.load(file)
        except FileNotFoundError:
            continue


def _result(run_dir: str, path: str) -> Any:
    if path == "run":
        return run_dir
    best = best_cell(run_dir)
    _, part, *names = path.split(".", 2)
    if part == "id":
        return best["id"]
    if part == "checkpoint":
        return _checkpoint(run_dir, best["id"])
    found = best[part].get(names[0])
    if found is None:
        known = ", ".join(best[part]) or "none"
        raise NoResult(f"the best cell of {run_dir} has no {path}; it has {known}")
    return found


def _checkpoint(run_dir: str, cell_id: str) -> str:
    folder = os.path.join(run_dir, "cells", cell_id, "checkpoints")
    for pointer in ("final", "latest"):
        try:
            with open(os.path.join(folder, pointer), encoding="utf-8") as file:
                return os.path.join(folder, file.read().strip())
        except FileNotFoundError:
            continue
    raise NoResult(f"the best cell of {run_dir}, {cell_id}, has no checkpoint")


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return repr(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
