"""The commands by which a person runs one cell outside of its run, in a shell."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hpcml.plan import Plan
from hpcml.render import container
from hpcml.render.environment import Trusted
from hpcml.worker.ranks import Context, Node, Ranks

# Values that nobody should see on a screen; a recipe has better ways (env_from), but may have them.
_SECRET = re.compile(r"token(?!iz)|secret|passw|credential|api_?key|private", re.IGNORECASE)
# The cell gets a folder of its own, so that the run stays as it is.
_HERE = '"$here"'


def by_hand(plan: Plan, cell: Mapping[str, Any], code: str, rung: int | None = None) -> list[str]:
    """What a worker executes for ``cell``, as lines for a shell on a node.

    Every value is quoted. Of what may be a secret the name is given, and not the value.

    Args:
        plan: the plan of the run.
        cell: the cell, as its worker has completed it, or as the plan has it.
        code: the folder of the code in the run folder, such as ``code/0123456789``.
        rung: with halving, the rung.
    """
    if plan.resources.nodes > 1:
        return [f"# it takes {plan.resources.nodes} nodes at once: run it by hpcml rerun"]
    if plan.kind == "infer":
        return ["# the workers of an inference share its cell: give the command again"]
    folder = plan.folder
    context = Context(
        run_dir=str(folder),
        plan=plan.document(),
        node=Node(0, 1, "127.0.0.1"),
        submission=0,
        task=0,
        job="",
        launch="",
        code=code,
        alone=False,
        rung=rung,
    )
    ranks = Ranks(context, dict(cell), None)
    ranks.number = 1
    lines = [
        f"here=$(mktemp -d -p {_quoted(str(folder))} by-hand.XXXXXX)",
        'mkdir "$here/checkpoints"',
        _cell_json(Path(ranks.dir), folder / "cells.jsonl", cell["index"]),
    ]
    lines += [f"# needs {name} from your environment" for name in plan.env_from]
    lines += [_export(name, value) for name, value in plan.site.env.items()]
    for line in plan.site.setup:
        lines.append("# a line of the site's setup is not shown" if _SECRET.search(line) else line)
    lines.append(f"export HPCML_DATA_ROOT={_quoted(str(plan.root / '.data'))}")
    if plan.pod is not None:
        lines.append(f"# in the image {plan.pod.image}")
    directory = _in_here(ranks.directory(), ranks.dir)
    lines.append(f"cd {directory}")
    variables = {**ranks.variables(), **(cell["payload"].get("env") or {})}
    words = [*_enter(plan, Path(ranks.directory()), folder / code), "env"]
    if plan.container is None:
        words += [f"PYTHONPATH={_quoted(str(folder / code))}", "PYTHONNOUSERSITE=1"]
    words += [_assigned(name, value, ranks.dir) for name, value in variables.items()]
    argv = " ".join(map(_quoted, ranks.arguments(plan.python)))
    if plan.resources.processes == 1:
        ranks_of_one = "RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 LOCAL_WORLD_SIZE=1 NODE_RANK=0"
        words += [ranks_of_one, "MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"]
        return [*lines, " \\\n  ".join([*words, argv])]
    count = plan.resources.processes
    words += [f'RANK="$rank" LOCAL_RANK="$rank" WORLD_SIZE={count} LOCAL_WORLD_SIZE={count}']
    words += ["NODE_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500"]
    loop = f"for rank in {' '.join(map(str, range(count)))}; do"
    return [*lines, loop, "  " + " \\\n  ".join([*words, f"{argv} &"]), "done", "wait"]


def _quoted(word: str) -> str:
    """A word for bash on one line, without a character that a terminal would obey."""
    if word.isprintable():
        return shlex.quote(word)
    plain = "".join(
        c if c.isprintable() and c not in "'\\" else "".join(f"\\x{b:02x}" for b in os.fsencode(c))
        for c in word
    )
    return f"$'{plain}'"


def _cell_json(cell_dir: Path, cells: Path, index: int) -> str:
    if (cell_dir / "cell.json").is_file():
        return f'cp {_quoted(str(cell_dir / "cell.json"))} "$here/cell.json"'
    return f'sed -n {index + 1}p {_quoted(str(cells))} > "$here/cell.json"'


def _in_here(value: str, cell_dir: str) -> str:
    """A path, quoted; what lies in the cell's folder lies in the new one instead."""
    if value == cell_dir or value.startswith(f"{cell_dir}/"):
        rest = value[len(cell_dir) :]
        return _HERE + (_quoted(rest) if rest else "")
    return _quoted(value)


def _assigned(name: str, value: str, cell_dir: str) -> str:
    shown = f'"${name}"' if _SECRET.search(name) else _in_here(str(value), cell_dir)
    return f"{name}={shown}"


def _export(name: str, value: str) -> str:
    if _SECRET.search(name):
        return f"# needs {name} from your environment"
    return f"export {name}={_quoted(value)}"


def _enter(plan: Plan, directory: Path, code: Path) -> list[str]:
    """What stands before the command so that it runs in the image, if there is one."""
    image = plan.container
    if image is None:
        return []
    words = []
    if enter := container.prepare(image):
        words.append(f"bash -c {_quoted(enter)} bash")
    else:
        options = container.srun_options(image, directory)
        words.append(f"srun --nodes=1 --ntasks=1 {' '.join(map(_line, options))}")
    inside = container.command(image, directory, code)
    # The last line is env itself, which has more to set.
    *before, environment = map(_line, inside)
    return [*words, *before, environment]


def _line(words: container.Line) -> str:
    return " ".join(word if isinstance(word, Trusted) else _quoted(word) for word in words)
