"""How the workers of a task on several nodes tell each other about a cell.

They share nothing but the run folder. The first node leads: it holds the cell, counts attempts and
writes the events. The others start their ranks when they see its ``started`` event, and leave a
report when their ranks have ended.
"""

import json
import os
from typing import Any, Optional

from hpcml.worker.events import write_json


def leave_report(cell_dir: str, launch: str, attempt: int, node: int, report: Any) -> None:
    """Say how the ranks of ``node`` ended: ``{"code": …, "cause": …, "reason": …}``."""
    os.makedirs(_folder(cell_dir), exist_ok=True)
    write_json(_path(cell_dir, f"{launch}.{attempt}.{node}"), report, durable=False)


def read_report(cell_dir: str, launch: str, attempt: int, node: int) -> "Optional[dict[str, Any]]":
    """The report of a node, or None while there is none."""
    report = _read(_path(cell_dir, f"{launch}.{attempt}.{node}"))
    return None if report is None else dict(report)


def dismiss(cell_dir: str, launch: str, code: int) -> None:
    """Tell the other nodes that this task is finished with the cell."""
    os.makedirs(_folder(cell_dir), exist_ok=True)
    write_json(_path(cell_dir, f"{launch}.end"), code, durable=False)


def dismissed(cell_dir: str, launch: str) -> Optional[int]:
    """The code with which the leader finished the cell, or None while it has not."""
    code = _read(_path(cell_dir, f"{launch}.end"))
    return None if code is None else int(code)


def clear(cell_dir: str) -> None:
    """Remove what earlier launches left. For the leader, before it starts an attempt."""
    folder = _folder(cell_dir)
    if os.path.isdir(folder):
        for name in os.listdir(folder):
            os.remove(os.path.join(folder, name))


def _folder(cell_dir: str) -> str:
    return os.path.join(cell_dir, "nodes")


def _path(cell_dir: str, name: str) -> str:
    return os.path.join(_folder(cell_dir), f"{name}.json")


def _read(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except FileNotFoundError:
        return None
