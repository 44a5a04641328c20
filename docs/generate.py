"""Write what comes from the code: reference pages, tables in others, and schemas/.

python docs/generate.py           writes them
python docs/generate.py --check   ends with 1 if one of them is not up to date
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcml import resources
from hpcml.recipe.hyperparameters import HYPERPARAMETERS, Hyperparameter
from hpcml.recipe.load import load_stages
from hpcml.recipe.schema import Recipe, json_schema
from hpcml.recipe.validation import Block, blocks
from hpcml.recipe.vocabulary import allowed_values
from hpcml.site.image_check import NEEDS, OLDEST, kind_of
from hpcml.site.images import known_images
from hpcml.site.schema import Site

DOCS = Path(__file__).resolve().parent

RECIPE_INTRODUCTION = """\
# Recipes

A recipe is one YAML file that says what to run, over which parameters, and with which resources.
Where it runs is said by a site, so the same recipe runs on a laptop and on a cluster.

```yaml
name: lr                       # the run's folder and its jobs are called so
kind: command                  # a program of yours; the other kind is train

params:                        # the same in all cells
  steps: 1000
sweep:                         # what varies: 3 * 2 = 6 cells
  grid:
    learning_rate: [1e-3, 3e-3, 1e-2]
    seed: [0, 1]

command:
  run: [python3, fit.py, "--lr={{ params.learning_rate }}", "--seed={{ params.seed }}",
        "--steps={{ params.steps }}"]

objective: {metric: loss, mode: min}   # what `hpcml results` ranks by
resources: {cpus: 1, time: 30m}        # what each cell needs
```

`hpcml sweep --dry-run recipe.yaml` shows how many cells and jobs there are, and the script of the
jobs, without starting anything; `--cells` lists the cells as well. With a time limit it says what
that may take at most: cells that are left, times `infer.workers`, times nodes, GPUs (cores, where
there are none) and the time of a job; with `slurm.coming_back: chain` times the jobs of a chain.
Elsewhere a job that comes back after its limit takes as much again, so it is the hours of one
attempt of each. A halving counts what each rung has. Each key can be replaced on the command line:
`--set resources.time=1h`, `--set sweep.grid.seed=[0]`.

With `budget: {gpu_hours: 500}` in a recipe, or in a site for all recipes there, what may take more
is submitted by `sweep` and `infer` only if you answer yes, or give `--yes`; where nobody can answer
it is refused (exit code 2).

## How YAML is read

Strictly: a key that is given twice, an unknown key, or a tab is an error that names file and line.
Scalars are those of YAML 1.2: `1e-4` is a number; `no`, `on`, `04:00:00` and `2024-01-31` are
text; only `true` and `false` are booleans. Numbers with leading zeros are text. The entries of
`command.run` and the values of `env` are taken as they are written: `1.10` stays `1.10`.

## Expressions

In the texts of `command`, `env`, `train.model` and `train.data`, `{{ params.x }}` is the value of
the parameter `x`, and `{{ cell.index }}` the number of the cell, from 0. Between the braces there
may be an expression of Jinja: `{{ params.width * 2 }}`,
`{{ 'fast' if params.batch > 8 else 'exact' }}`, `{{ params.name | upper }}`. Nothing can be called.
Text arrives unchanged, whatever is in it, and is never part of a shell script; numbers are written
so that reading them gives the same number; `true`, `false` and `null` are as in YAML; lists and
mappings become JSON. Outside `{{ }}` nothing is special.

Conditions, in `sweep.exclude` and `sweep.when`, are the same expressions without braces:
`params.optim == 'sgd' and params.learning_rate > 0.1`.

## Stages

A recipe may have several stages, each a recipe of its own without a name:

```yaml
name: study
resources: {cpus: 1}               # for every stage that does not say otherwise
stages:
  explore:
    kind: train
    sweep: {grid: {learning_rate: [1e-3, 3e-3]}}
    train: {data: {source: python-stdlib}}
  longer:
    needs: [explore]               # begins when every cell of explore is done
    kind: train
    params: {learning_rate: "{{ stages.explore.best.params.learning_rate }}", max_steps: 2000}
    train: {data: {source: python-stdlib}, model: "{{ stages.explore.best.checkpoint }}"}
```

One command submits them all; on a cluster nothing stays behind on the login node. Each stage is a
run of its own, here `study.explore` and `study.longer`. What an earlier stage found is looked up
when a cell starts: `stages.NAME.best.params.X`, `.best.metrics.X`, `.best.checkpoint` (a folder),
`.best.id`, and `stages.NAME.run`, the run folder. `best` is the best cell by the stage's objective;
X is a parameter that the stage's recipe gives, under its first name (`learning_rate`, not `lr`).
A parameter of a training may be such a value alone, a text may have it anywhere.

## Sweeps

Every part of `sweep` is an axis, and the cells are the product of all axes, in the order of the
file, the last axis fastest: each key of `grid`; each mapping of `zip`; `random`; `points`. A swept
value replaces the one in `params`. Dots reach into nested parameters: `model.width: [64, 128]`.

```yaml
sweep:
  grid:
    optim: [adamw, sgd]
    momentum: [0.0, 0.9]
  when:
    momentum: params.optim == 'sgd'      # adamw has no momentum: it is one cell, not two
  exclude:
    - {optim: sgd, momentum: 0.0}        # all of these equal
    - params.momentum > 0.95             # or an expression
```

Conditions of `when` are looked at in their order, those of `exclude` after them. A sweep has at
most 1,000,000 cells.

The id of a cell depends on what decides its result (kind, parameters, and what is run), and not on
the order of keys, on the other cells, or on `name`, `description`, `resources`, `array`,
`checkpoint` and `retry`. A run is a set of cells: the same command again finds it, also with more
time or other resources, and the cells that are done stay done. Other cells, such as those of a grid
with one value more, are another run with a folder of its own, which runs all of its cells.

## Halving

`sweep.halving` trains only promising cells to the end. All cells train a part of the way, the
first rung; the best of them go on, from their checkpoints, to the next one, and so forth.

```yaml
sweep:
  grid: {learning_rate: [3e-4, 3e-3, 3e-2], weight_decay: [0, 0.1, 1], seed: [0, 1, 2]}
  halving: {metric: eval_loss, mode: min, factor: 3, rungs: 3}
```

With 27 cells, `factor: 3` and `params.max_steps: 450`, rung 1 is 27 cells to step 50, rung 2 the
best 9 of them to step 150, rung 3 the best 3 to step 450; `--dry-run` says so, and that this is
26 % of the steps. A rung changes where a training stops and nothing else: the cell, its id and
the schedule of its learning rate are those of the whole training. At the end of a rung it is
evaluated.

- A program (`kind: command`) finds in `$HPCML_STEPS` the step up to which it is to go, counted
  from its first beginning, and in `$HPCML_RUNG` the rung; `{{ halving.steps }}` in its arguments
  or `env` is that step as well. It goes on from what it left in `$HPCML_CHECKPOINTS`, reports the
  metric, and ends with 0. `sweep.halving.steps` is a whole training.
- A cell that failed, was cancelled, or has no finite value of the metric is no candidate. Equal
  values keep the order of the sweep. If fewer are left than a rung has places, it has fewer
  cells.
- Who goes on is decided once, by the first task of the later rung that begins, and is in
  `rungs/<n>.json` of the run folder. Cells that do not are `dropped`, with the rung as the
  reason.
- A rung begins when the one before is over. A cell that is `stopped` or `lost` may still end, so
  the rung waits for it: give the command again.
- On Slurm all rungs are submitted at once, each to follow the one before. While any of it is
  queued, the command given again adds nothing. On Volcano a rung is submitted when the one before
  is over: with `--wait`, or by giving the command again.
- The exit code is 0 when all cells are done or dropped. A cell that failed in an earlier rung
  stays so: it is not run anew once the next rung has begun.
- Results rank cells of a later rung before those of an earlier one. Other settings of `halving`
  are another run.

Stages, inference and a swept `max_steps` can't be halved.

## Running cells anew

Cells that are done stay done even when your code has changed since; the preview says so. To run
them anew, remove the run folder that `hpcml status` prints, or give another place by `--root`.

## What a program finds

Its arguments, the recipe's `env`, and the variables named in docs/design.md, such as
`$HPCML_CELL_DIR`, a folder that stays. It starts from a copy of your project. hpcml sets
`PYTHONNOUSERSITE=1`, so that packages in `~/.local` do not hide those of the environment; install
what is needed into the environment. `$TMPDIR` and the caches (`XDG_CACHE_HOME`, and those of Triton
and of torch's compiler) are folders of the attempt, removed when it ends, so that cells never
share a half-written file. A cache that is worth keeping gets a place by its own variable, such as
`env: {HF_HOME: /scratch/me/huggingface}` for models and data of Hugging Face.

## Keys
"""

HYPERPARAMETERS_INTRODUCTION = """\
# Hyperparameters

What `params` and `sweep` of a recipe of kind `train` may have. There is one name for each thing;
the other names in the table are accepted, and stored under the first one. A parameter that the
engine would ignore is an error, and so are values that contradict each other.

`null` means that a parameter isn't used, or that it follows from others as its meaning says.
"""

IMAGES, END_OF_IMAGES = "<!-- images -->", "<!-- end of images -->"
SITE_KEYS, END_OF_KEYS = "<!-- keys -->", "<!-- end of keys -->"

WORDS = {
    "string": "text",
    "integer": "whole number",
    "number": "number",
    "boolean": "true or false",
    "object": "mapping",
    "array": "list",
}


def recipe_page() -> str:
    """Return docs/recipe.md."""
    return RECIPE_INTRODUCTION + _tables(Recipe)


def sites_page() -> str:
    """Return docs/sites.md, which is written by hand but for the tables of keys."""
    return _filled("sites.md", SITE_KEYS, _tables(Site), END_OF_KEYS)


def containers_page() -> str:
    """Return docs/containers.md, which is written by hand but for the tables of images."""
    return _filled("containers.md", IMAGES, _images() + _recipes(), END_OF_IMAGES)


def _filled(page: str, begin: str, text: str, end: str) -> str:
    """A page with ``text`` between two marks."""
    before, _, rest = (DOCS / page).read_text(encoding="utf-8").partition(f"{begin}\n")
    _, found, after = rest.partition(end)
    assert found, f"docs/{page} has no {begin} and {end}"
    return f"{before}{begin}\n{text}{end}{after}"


def _images() -> str:
    rows = ["\n| image | begins with | has | and installs | serves |\n|---|---|---|---|---|\n"]
    for image in known_images().values():
        has, adds = (
            ", ".join(f"{name} {version}" for name, version in versions.items())
            for versions in (image.contains, image.adds)
        )
        base = f"`{image.base}` ([source]({image.source}))"
        cells = (f"**{image.name}** {image.tag}", base, has, adds, ", ".join(image.serves))
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _recipes() -> str:
    """Which image serves which of the recipes that come with hpcml, and what each kind needs."""
    found: dict[str, list[str]] = {kind: [] for kind in NEEDS}
    for path in sorted(resources.folder("recipes").glob("*.yaml")):
        for kind in dict.fromkeys(kind_of(loaded.recipe) for loaded in load_stages(path)):
            found[kind].append(path.name)
    rows = ["\n| recipe | for example | needs | images |\n|---|---|---|---|\n"]
    for kind, need in NEEDS.items():
        needs = [
            f"{name} {OLDEST[name]}" if OLDEST[name] != "0" else name for name in need.packages
        ]
        images = [image.name for image in known_images().values() if kind in image.serves]
        cells = (
            kind,
            ", ".join(found[kind]),
            ", ".join(needs) or "Python alone",
            ", ".join(images),
        )
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def _tables(model: type[Block]) -> str:
    definitions = model.model_json_schema()
    parts = []
    for key, block in blocks(model):
        schema = definitions["$defs"][block.__name__] if key else definitions
        parts.append(f"\n### `{key}`\n\n{schema['description']}\n" if key else "")
        parts.append("\n| key | value | default | meaning |\n|---|---|---|---|\n")
        parts += [f"| {' | '.join(row)} |\n" for row in _keys(key, block, schema, definitions)]
    return "".join(parts)


def _keys(
    prefix: str, block: type[Block], schema: dict[str, Any], definitions: dict[str, Any]
) -> Iterator[tuple[str, str, str, str]]:
    required = schema.get("required", [])
    for name, field in schema["properties"].items():
        path = f"{prefix}.{name}" if prefix else name
        reference = _reference(field)
        if reference:
            value = f"[mapping](#{path.replace('.', '')})"
            meaning = field.get("description") or definitions["$defs"][reference]["description"]
        else:
            value, meaning = _value(field), field["description"]
        info = block.model_fields[name]
        if name in required:
            default = "required"
        elif reference or info.default is None or info.default_factory is not None:
            default = ""
        else:
            written = block.__pydantic_serializer__.to_python(
                block.model_construct(**{name: info.default}), include={name}
            )[name]
            default = f"`{_text(written)}`" if written != "" else ""
        yield f"`{name}`", value, default, meaning.replace("|", "\\|")


def _reference(field: dict[str, Any]) -> str | None:
    for part in (field, *field.get("anyOf", [])):
        if "$ref" in part:
            return str(part["$ref"]).rpartition("/")[2]
    return None


def _value(field: dict[str, Any]) -> str:
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "const" in field:
        return f"`{field['const']}`"
    if "anyOf" in field:
        return " or ".join(_value(part) for part in field["anyOf"] if part.get("type") != "null")
    kind = field.get("type", "")
    if "examples" in field:
        return "time" if "integer" in kind else "size"
    words = WORDS.get(kind, "value")
    limits = [
        f"{sign} {field[limit]:,}"
        for limit, sign in (
            ("minimum", "≥"),
            ("exclusiveMinimum", ">"),
            ("maximum", "≤"),
            ("exclusiveMaximum", "<"),
        )
        if limit in field
    ]
    return " ".join((words, *limits))


def hyperparameters_page() -> str:
    """Return docs/hyperparameters.md."""
    parts = [HYPERPARAMETERS_INTRODUCTION]
    for group in dict.fromkeys(row.group for row in HYPERPARAMETERS):
        parts.append(f"\n## {group}\n\n")
        parts.append("| name | value | default | meaning | engines |\n|---|---|---|---|---|\n")
        parts += [_row(row) for row in HYPERPARAMETERS if row.group == group]
    return "".join(parts)


def _row(row: Hyperparameter) -> str:
    name = f"**{row.name}**"
    if row.aliases:
        name += "<br>" + ", ".join(row.aliases)
    value = allowed_values(row) + (f" ({row.unit})" if row.unit and "list" not in row.kind else "")
    if row.default_by:
        default = ", ".join(f"{_text(value)} ({key})" for key, value in row.default_by.items())
    else:
        default = _text(row.default)
    meaning = row.meaning
    for selector, allowed in row.only_with:
        choices = " or ".join(allowed)
        meaning += f" Only with {selector} {choices}." if choices else f" Only with {selector}."
    if row.new_model:
        meaning += " Only for a new model."
    engines = "<br>".join(f"{engine}: {how}" for engine, how in row.engines.items())
    return f"| {name} | {value} | {default} | {meaning} | {engines or 'none yet'} |\n"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _schema(schema: dict[str, Any]) -> str:
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


PAGES = {
    "recipe.md": recipe_page,
    "hyperparameters.md": hyperparameters_page,
    "sites.md": sites_page,
    "containers.md": containers_page,
    "../schemas/recipe.json": lambda: _schema(json_schema()),
    "../schemas/site.json": lambda: _schema(Site.model_json_schema()),
}


def main(arguments: list[str]) -> int:
    """Write the pages, or check them; return the exit code."""
    stale = []
    for name, make in PAGES.items():
        path, text = DOCS / name, make()
        if arguments == ["--check"]:
            if not path.exists() or path.read_text(encoding="utf-8") != text:
                stale.append(name)
        else:
            path.write_text(text, encoding="utf-8")
    if stale:
        print(f"not up to date: {', '.join(stale)}; run python docs/generate.py", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
