"""Prompts as tokens: what all engines do alike, so that they see the same."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hpcml.infer.engine import Answer, EngineConfig, EngineError, Request


def tokens_of(
    tokenizer: Any, request: Request, chat_template: str | None, longest: int
) -> list[int] | Answer:
    """The tokens of a question, or the answer that it has none.

    Args:
        tokenizer: of Hugging Face.
        request: the question.
        chat_template: instead of the tokenizer's own, or None.
        longest: tokens of a prompt that leave room for one more.
    """
    try:
        if request.is_chat:
            # Its template writes the special tokens, where it has any.
            text = tokenizer.apply_chat_template(
                json.loads(request.text),
                chat_template=chat_template,
                add_generation_prompt=True,
                tokenize=False,
            )
            tokens = tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            tokens = tokenizer(request.text)["input_ids"]
    except Exception as error:  # noqa: BLE001
        # A template that raises an exception, a message of a form that it does not know.
        return failed(request, "template", f"{type(error).__name__}: {error}")
    if not tokens:
        return failed(request, "empty", "the prompt has no tokens")
    if len(tokens) > longest:
        message = f"the prompt has {len(tokens):,} tokens, the model takes {longest:,}"
        return failed(request, "too_long", message)
    return list(tokens)


def failed(request: Request, cause: str, message: str) -> Answer:
    """The answer of a question that has none."""
    return Answer(request.row, cause=cause, error=" ".join(message.split())[:1000])


def check_arguments(config: EngineConfig, known: set[str], taken: Mapping[str, str]) -> None:
    """Refuse arguments that the engine does not have.

    Args:
        config: with the arguments.
        known: those of the engine.
        taken: those that the recipe has elsewhere, and where.

    Raises:
        EngineError: one is unknown, or is given elsewhere.
    """
    import difflib

    for name in config.arguments:
        if name in taken:
            raise EngineError(f"infer.engine_args.{name}: the recipe has it as {taken[name]}")
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise EngineError(
                f"infer.engine_args.{name}: the engine {config.engine} has no such argument{hint}"
            )
