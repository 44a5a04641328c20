"""Greedy answers of two engines: the same, but where two tokens have the same score."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# What the order of additions changes in fp32, with room: scores of the tests' models are about 1.
_TIE = 1e-4


def check_same_but_ties(
    mine: Mapping[str, tuple[Any, ...]],
    theirs: Mapping[str, tuple[Any, ...]],
    folder: Path,
    tokens: int,
) -> None:
    """At least 99% are the same, and the others have a tie on their way.

    Args:
        mine, theirs: the question, and what was answered, by key.
        folder: the model's.
        tokens: the longest answer.
    """
    assert mine.keys() == theirs.keys()
    different = [key for key in mine if mine[key] != theirs[key]]
    assert len(different) <= len(mine) / 100, different
    for key in different:
        gap = smallest_gap(folder, mine[key][0], tokens)
        assert gap < _TIE, f"{key}: {mine[key]}, {theirs[key]}, no tie: {gap}"


def smallest_gap(folder: Path, question: str, tokens: int) -> float:
    """The smallest distance between the best and the second score, over all tokens of an answer."""
    model, tokenizer = (
        kind.from_pretrained(folder) for kind in (AutoModelForCausalLM, AutoTokenizer)
    )
    inputs = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
    with torch.inference_mode():
        found = model.generate(
            **inputs, max_new_tokens=tokens, do_sample=False, pad_token_id=0,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    best = torch.cat(found.logits).topk(2).values
    return float((best[:, 0] - best[:, 1]).min())
