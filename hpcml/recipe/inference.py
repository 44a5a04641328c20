"""The cells of a recipe in which a language model answers the rows of a table."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, TemplateSyntaxError

from hpcml.recipe.cell import Row, canonical_json
from hpcml.recipe.payload import Rendered, compiled, digest
from hpcml.recipe.problems import KeyPath, Problems
from hpcml.recipe.schema import Infer, InferInput, Recipe
from hpcml.recipe.stages import Stages, is_token
from hpcml.recipe.vocabulary import Contradiction, resolve_generation

_FORMATS = {".jsonl": "jsonl", ".json": "jsonl", ".csv": "csv"}


def input_format(source: InferInput) -> str:
    """The format of an input that does not say it: as the first name ends."""
    return source.format or _FORMATS.get(os.path.splitext(source.files[0])[1], "parquet")


def check_inference(problems: Problems, recipe: Recipe, infer: Infer) -> None:
    """Record what does not go together in the block ``infer``."""
    openai = input_format(infer.input) == "openai"
    asked = [infer.prompt is not None, infer.messages is not None, openai]
    if sum(asked) != 1:
        problems.add(
            ("infer",),
            "exactly one of prompt, messages and input.format openai says what is asked",
        )
    for name in ("prompt", "system"):
        try:
            Environment().compile(getattr(infer, name) or "")
        except TemplateSyntaxError as error:
            where = f" (line {error.lineno} of it)" if error.lineno > 1 else ""
            problems.add(("infer", name), f"it is not a template of Jinja: {error.message}{where}")
    if infer.system is not None and not infer.chat:
        problems.add(("infer", "system"), "it needs chat: true")
    if infer.chat and infer.prompt is None:
        problems.add(("infer", "chat"), "it goes with prompt; messages are a chat anyway")
    if openai and infer.input.key is not None:
        problems.add(("infer", "input", "key"), "in the format openai the key is custom_id")
    output = infer.output
    if output.format == "openai" and (output.columns or output.rows_per_file):
        problems.add(("infer", "output"), "the format openai has neither columns nor rows_per_file")
    for name in ("nodes", "processes"):
        if (getattr(recipe.resources, name) or 1) > 1:
            problems.add(
                ("resources", name),
                "a worker of an inference is one process on one node; infer.workers gives more",
            )
    if recipe.array.pack > 1:
        problems.add(("array", "pack"), "an inference has a job for each worker")
    if recipe.objective is not None:
        problems.add(("objective",), "answers have no metric to compare by")


class InferCells(Rendered):
    """The cells of an inference, mostly one; a sweep is over generation parameters."""

    def __init__(
        self,
        recipe: Recipe,
        names: tuple[str, ...],
        fixed: Mapping[str, Any],
        folder: Path,
        problems: Problems,
        places: Mapping[str, KeyPath],
        stages: Stages,
    ) -> None:
        assert recipe.infer is not None
        self.names = names
        self._recipe = recipe
        self._infer = infer = recipe.infer
        self.fixed = dict(fixed)
        self._folder = folder
        self._problems = problems
        self._places = places
        self._stages = stages
        texts: dict[KeyPath, str | None] = {
            ("infer", "model"): infer.model,
            ("infer", "adapter"): infer.adapter,
            ("infer", "output", "path"): infer.output.path,
        }
        texts |= {
            ("infer", "input", "files", place): text for place, text in enumerate(infer.input.files)
        }
        texts |= {("env", name): text for name, text in recipe.env.items()}
        self._templates = {
            path: compiled(text, path, problems) for path, text in texts.items() if text is not None
        }
        self._chat_template = self._read_chat_template()
        self._outputs: dict[str, str] = {}

    def payload(self, row: Row, index: int) -> dict[str, Any]:
        """Return what the inference needs, with the complete parameters."""
        infer = self._infer
        return {
            **self._decisive(row, index),
            "shard_rows": infer.shard_rows,
            "max_failed": infer.max_failed,
        }

    def identity(self, row: Row, index: int) -> str:
        """Return the cell's id. How many workers share it, and in what shards, does not count."""
        payload = self._decisive(row, index)
        identity = digest(f'{{"kind":"infer","payload":{canonical_json(payload)}}}')
        path = payload["output"]["path"]
        if path is not None and self._outputs.setdefault(path, identity) != identity:
            self._problems.add(
                ("infer", "output", "path"),
                f"several cells would write {path}; put a parameter into it, such as "
                "{{ params.temperature }}, or leave it out",
            )
            self._problems.raise_any()
        return identity

    def _decisive(self, row: Row, index: int) -> dict[str, Any]:
        infer = self._infer
        parameters = self._resolve(row)
        texts = self._render(parameters, index)
        adapter, path = texts.get(("infer", "adapter")), texts.get(("infer", "output", "path"))
        source = input_format(infer.input)
        columns = None if infer.output.columns == ["*"] else infer.output.columns
        return {
            "engine": infer.engine,
            "model": self._absolute(texts["infer", "model"]),
            "adapter": None if adapter is None else self._absolute(adapter),
            "parameters": parameters,
            "engine_args": infer.engine_args,
            "input": {
                "files": [
                    self._pattern(texts["infer", "input", "files", place])
                    for place in range(len(infer.input.files))
                ],
                "format": source,
                "key": "custom_id" if source == "openai" else infer.input.key,
            },
            "prompt": infer.prompt,
            "chat": infer.chat,
            "system": infer.system,
            "messages": infer.messages,
            "chat_template": self._chat_template,
            "output": {
                "path": None if path is None else self._absolute(path),
                "format": infer.output.format,
                "columns": columns,
                "rows_per_file": infer.output.rows_per_file,
            },
            "env": {name: texts["env", name] for name in self._recipe.env},
        }

    def _resolve(self, row: Row) -> dict[str, Any]:
        given = self.params(row)
        later = {name: value for name, value in given.items() if is_token(value)}
        known = {name: value for name, value in given.items() if name not in later}
        try:
            gpus = self._recipe.resources.gpus
            return {**resolve_generation(known, self._infer.engine, gpus), **later}
        except Contradiction as error:
            for name, message in error.mistakes:
                self._problems.add(self._places.get(name, ("params", name)), message)
            self._problems.raise_any()
            raise

    def _read_chat_template(self) -> str | None:
        name = self._infer.chat_template
        if name is None:
            return None
        path = self._folder / name
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            self._problems.add(("infer", "chat_template"), f"cannot read {path}: {error}")
            return None
