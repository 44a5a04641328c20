"""What every engine is to the rest: questions in, answers out, as they become ready."""

from __future__ import annotations

import hashlib
import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

_MODULES = {
    "transformers": "hpcml.infer.engines.transformers",
    "vllm": "hpcml.infer.engines.vllm",
    "sglang": "hpcml.infer.engines.sglang",
}


@dataclass(frozen=True)
class Request:
    """A question.

    Attributes:
        row: the number by which its answer is known.
        text: the prompt, or the messages of a chat as JSON.
        is_chat: which of the two.
        parameters: complete generation parameters.
        seed: of this row alone.
    """

    row: int
    text: str
    is_chat: bool
    parameters: Mapping[str, Any]
    seed: int


@dataclass(frozen=True)
class Answer:
    """What came of a question; each list has an entry for each of the n answers.

    Attributes:
        row: the number of the question.
        text: the answers.
        finish_reason: why each ended: ``stop`` or ``length``.
        prompt_tokens: tokens of the prompt.
        output_tokens: tokens of each answer.
        logprobs: natural logarithm of the probability of each token, where that was asked for.
        seconds: from the engine's taking the question to the end of its answer.
        cause, error: why there is no answer.
    """

    row: int
    text: Sequence[str] | None = None
    finish_reason: Sequence[str] | None = None
    prompt_tokens: int | None = None
    output_tokens: Sequence[int] | None = None
    logprobs: Sequence[Sequence[float]] | None = None
    seconds: float | None = None
    cause: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class EngineConfig:
    """How an engine is made.

    Attributes:
        engine: its name.
        model: the model's folder.
        adapter: the folder of a LoRA adapter, or None.
        parameters: those that hold for the engine as a whole, such as tensor_parallel_size.
        arguments: further arguments of the engine, by its own names.
        chat_template: instead of the tokenizer's own, or None.
    """

    engine: str
    model: Path
    adapter: Path | None
    parameters: Mapping[str, Any]
    arguments: Mapping[str, Any]
    chat_template: str | None


def batch_size(engine: str, arguments: Mapping[str, Any]) -> int:
    """How many rows are asked together, always the same ones, so that an answer does not depend on
    what else is asked; 1 for engines in which every row goes its own way.
    """
    return int(arguments.get("batch_size", 16)) if engine == "transformers" else 1


class EngineError(Exception):
    """The engine can't be made as it was asked; the message says what to change."""


class Engine(Protocol):
    """Answers questions, several at a time.

    Attributes:
        limit: how many questions it should have, so that it always has work.
    """

    limit: int

    def add(self, requests: Sequence[Request]) -> list[Answer]:
        """Take questions to ask together; returns the answers of those that it refuses."""

    def step(self) -> list[Answer]:
        """Go on for a while; returns the answers that became ready."""


def make_engine(config: EngineConfig) -> Engine:
    """The engine of a configuration.

    Raises:
        EngineError: a package is missing, or an argument is unknown.
    """
    try:
        module = importlib.import_module(_MODULES[config.engine])
        engine: Engine = module.make(config)
    except ImportError as error:
        raise EngineError(
            f"the engine {config.engine} cannot be imported in this environment: {error}"
        ) from error
    return engine


def row_seed(seed: int, key: str) -> int:
    """The seed of a row: from the recipe's seed and the row's key, whichever worker has it."""
    return int.from_bytes(hashlib.sha256(f"{seed}\0{key}".encode()).digest()[:4], "big")
