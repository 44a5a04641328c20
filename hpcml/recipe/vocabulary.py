"""What the hyperparameter table means: names, values, and which of them go together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from hpcml.layout import Layout, Shape
from hpcml.recipe.deepspeed import contradictions
from hpcml.recipe.hyperparameters import (
    ALIASES,
    ANY,
    BY_NAME,
    ELSEWHERE,
    HYPERPARAMETERS,
    Hyperparameter,
)
from hpcml.recipe.problems import did_you_mean, nearest

Values = Mapping[str, Any]

BATCH = ("global_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True)
class Setting:
    """What of a recipe, besides its parameters, decides which parameters make sense.

    Attributes:
        engine: the engine that trains.
        processes: processes on all nodes together.
        has_model: a model is fine-tuned, not made.
        has_tokenizer: the tokenizer is given, not trained.
        packing: sequences are packed from several documents.
        deepspeed: the recipe's own configuration of DeepSpeed.
    """

    engine: str
    processes: int = 1
    has_model: bool = False
    has_tokenizer: bool = False
    packing: bool = True
    deepspeed: Mapping[str, Any] = field(default_factory=dict)


class Contradiction(ValueError):
    """Parameters that don't go together: ``(name, message)`` for each mistake."""

    def __init__(self, mistakes: list[tuple[str, str]]) -> None:
        super().__init__("; ".join(f"{name}: {message}" for name, message in mistakes))
        self.mistakes = mistakes


def canonical_name(name: str, engine: str) -> str:
    """Return the name that a parameter is stored under.

    Raises:
        ValueError: the vocabulary doesn't have it, or the engine would ignore it.
    """
    row = BY_NAME.get(ALIASES.get(name, name))
    if row is None:
        if name in ELSEWHERE:
            raise ValueError(f"this is no hyperparameter; a recipe has it as {ELSEWHERE[name]}")
        known = [row.name for row in HYPERPARAMETERS if engine in row.engines]
        close = did_you_mean(name, [*known, *ALIASES])
        if not close.startswith("; did"):
            close = "; docs/hyperparameters.md lists them all"
        raise ValueError(f"there is no such hyperparameter{close}")
    if engine not in row.engines:
        users = ", ".join(row.engines) or "none of this version"
        raise ValueError(
            f"the engine {engine} would ignore it, so it is refused; engines that use it: {users}"
        )
    return row.name


def allowed_values(row: Hyperparameter, engine: str | None = None) -> str:
    """Return what a parameter may be, in words; with an engine, what it may be there."""
    if row.kind == "choice":
        return "one of " + ", ".join(_choices(row, engine))
    words = {
        "list": "a list" + (" of whole numbers" if row.minimum is not None else " of texts"),
        "JSON": "a text or a mapping",
    }.get(row.kind, row.kind if row.kind in ("text", "true or false") else f"a {row.kind}")
    if row.kind in ("whole number", "number"):
        low = f"≥ {row.minimum:g}" if row.minimum is not None else ""
        low = f"> {row.above:g}" if row.above is not None else low
        high = f"≤ {_short(row.maximum)}" if row.maximum is not None else ""
        high = f"< {row.below:g}" if row.below is not None else high
        limits = " and ".join(limit for limit in (low, high) if limit)
        words += f" {limits}" if limits else ""
        if row.name == "grad_norm_type":
            words += ", or inf"
    return words


def _choices(row: Hyperparameter, engine: str | None) -> tuple[str, ...]:
    return row.engine_choices.get(engine or "", row.choices)


def checked_value(row: Hyperparameter, value: Any, engine: str | None = None) -> Any:
    """Return the value in the form in which it is stored, so that equal values are the same.

    Args:
        row: the parameter.
        value: as it is written.
        engine: whose choices count; by default those of all.

    Raises:
        ValueError: wrong type or out of range; the message says what is allowed.
    """
    if value is None and row.default is None and not row.default_by:
        return None
    checked = _CHECKS[row.kind](row, value)
    if row.kind == "choice" and checked not in _choices(row, engine):
        checked = None
    if checked is None:
        hint = ""
        if isinstance(value, str) and row.kind in ("whole number", "number"):
            hint = " (it is text)"
        elif isinstance(value, str) and (close := nearest(value, _choices(row, engine))):
            hint = f"; did you mean {close!r}?"
        where = f" with the engine {engine}" if engine in row.engine_choices else ""
        raise ValueError(f"must be {allowed_values(row, engine)}{where}, not {_shown(value)}{hint}")
    return checked


def _whole(row: Hyperparameter, value: Any) -> int | None:
    if isinstance(value, float) and value.is_integer():  # 1e5
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if _in_range(row, value) else None


def _number(row: Hyperparameter, value: Any) -> float | str | None:
    if row.name == "grad_norm_type" and value in ("inf", math.inf):
        return "inf"  # JSON has no number for it
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) and _in_range(row, number) else None


def _in_range(row: Hyperparameter, value: float) -> bool:
    return (
        (row.minimum is None or value >= row.minimum)
        and (row.maximum is None or value <= row.maximum)
        and (row.above is None or value > row.above)
        and (row.below is None or value < row.below)
    )


def _list(row: Hyperparameter, value: Any) -> list[Any] | None:
    if not isinstance(value, list) or not value:
        return None
    whole = row.minimum is not None
    for item in value:
        if whole and (isinstance(item, bool) or not isinstance(item, int) or item < 0):
            return None
        if not whole and not (isinstance(item, str) and item):
            return None
    return value


_CHECKS: Mapping[str, Callable[[Hyperparameter, Any], Any]] = {
    "whole number": _whole,
    "number": _number,
    "true or false": lambda row, value: value if isinstance(value, bool) else None,
    "text": lambda row, value: value if isinstance(value, str) and value else None,
    "choice": lambda row, value: value if value in row.choices else None,
    "list": _list,
    "JSON": lambda row, value: value if isinstance(value, (str, dict)) and value else None,
}


def resolve(given: Values, setting: Setting) -> dict[str, Any]:
    """Return every parameter of the engine with its value, so that nothing is left to guess.

    Args:
        given: checked values under canonical names.
        setting: what else of the recipe matters.

    Returns:
        All parameters that the engine uses, in the table's order. Those that don't apply (the
        momentum of adamw, say) are None.

    Raises:
        Contradiction: some of the values don't go together.
    """
    mistakes: list[tuple[str, str]] = []
    rows = [row for row in HYPERPARAMETERS if setting.engine in row.engines]
    values = {row.name: _value(row, given) for row in rows}
    for row in rows:
        for selector, allowed in row.only_with:
            if _satisfied(values[selector], allowed):
                continue
            if row.name in given and given[row.name] not in (row.off, None):
                mistakes.append((row.name, _ignored(row, selector, allowed, values[selector])))
            else:
                values[row.name] = row.off if row.off == row.default else None
    mistakes += _new_model(values, given, setting)
    mistakes += _length(values, given)
    mistakes += _batch(values, given, setting)
    blamed = {name for name, _ in mistakes}
    mistakes += [
        mistake for mistake in _conflicts(values, given, setting) if mistake[0] not in blamed
    ]
    if mistakes:
        raise Contradiction(mistakes)
    return values


def resolve_generation(given: Values, engine: str, gpus: int) -> dict[str, Any]:
    """Return every parameter of an engine of inference with its value.

    Args:
        given: checked values under canonical names.
        engine: the engine.
        gpus: GPUs of each worker.

    Raises:
        Contradiction: some of the values don't go together.
    """
    rows = [row for row in HYPERPARAMETERS if engine in row.engines]
    values = {row.name: _value(row, given) for row in rows}
    mistakes: list[tuple[str, str]] = []
    forms = [name for name in ("json_schema", "regex", "grammar", "choice") if given.get(name)]
    mistakes += [(name, f"an answer has one form, and {forms[0]} is given") for name in forms[1:]]
    beams = values.get("num_beams") or 1
    if beams > 1:
        mistakes += [
            (name, "it would be ignored, because num_beams makes a beam search of it")
            for name in ("temperature", "top_k", "top_p", "logprobs")
            if given.get(name)
        ]
        if values["n"] > beams:
            mistakes.append(("n", f"a beam search of {beams} has no more than {beams} answers"))
    elif values["n"] > 1 and values["temperature"] == 0:
        mistakes.append(("n", "with temperature 0 all answers to a prompt would be the same"))
    if (values.get("min_tokens") or 0) > values["max_tokens"]:
        mistakes.append(("min_tokens", f"it is above max_tokens, {values['max_tokens']}"))
    if (values.get("data_parallel_size") or 1) > 1:
        mistakes.append(("data_parallel_size", "copies of the model are given by infer.workers"))
    across = (values.get("tensor_parallel_size") or 1) * (values.get("pipeline_parallel_size") or 1)
    if gpus and across != gpus:
        name = "tensor_parallel_size"
        if name in values:
            mistakes.append(
                (
                    name,
                    f"resources.gpus is {gpus}, and tensor_parallel_size * pipeline_parallel_size "
                    f"is {across}; they must be the same",
                )
            )
    if mistakes:
        raise Contradiction(mistakes)
    return values


def interacting(names: Collection[str]) -> frozenset[str]:
    """Return those of the given parameters whose values matter for others; the rest stand alone.

    A sweep resolves only the combinations of these, not each of its cells.
    """
    matter = {*BATCH, *_CONFLICTING}
    for row in HYPERPARAMETERS:
        if row.only_with:
            matter.add(row.name)
            matter.update(selector for selector, _ in row.only_with)
        if row.new_model:
            matter.add(row.name)
    if "lr_end" in names or "lr_base" in names:
        matter.add("learning_rate")
    return frozenset(names) & matter


def _value(row: Hyperparameter, given: Values) -> Any:
    if row.name in given:
        return given[row.name]
    if row.default_by:
        selector = row.only_with[0][0]
        return row.default_by.get(given.get(selector, BY_NAME[selector].default))
    return row.default


def _satisfied(actual: Any, allowed: tuple[Any, ...]) -> bool:
    return actual is not None if allowed == ANY else actual in allowed


def _ignored(row: Hyperparameter, selector: str, allowed: tuple[Any, ...], actual: Any) -> str:
    if allowed == ANY:
        return f"it would be ignored, because {selector} is not given"
    choices = " or ".join(str(value) for value in allowed)
    return (
        f"it would be ignored, because {selector} is {actual}; it needs {choices} (to sweep over "
        f"{selector}, sweep {row.name} too, with a condition in sweep.when)"
    )


def _new_model(values: dict[str, Any], given: Values, setting: Setting) -> list[tuple[str, str]]:
    mistakes = []
    for row in HYPERPARAMETERS:
        if not row.new_model or row.name not in values:
            continue
        if setting.has_model:
            if given.get(row.name) is not None:
                mistakes.append(
                    (row.name, "it describes a new model, but train.model takes an existing one")
                )
            values[row.name] = None
    if setting.has_tokenizer and not setting.has_model:
        if given.get("vocab_size") is not None:
            mistakes.append(("vocab_size", "the tokenizer of train.data.tokenizer decides it"))
        values["vocab_size"] = None
    if setting.has_model or mistakes:
        return mistakes
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = values["num_attention_heads"]
    if values["intermediate_size"] is None:
        values["intermediate_size"] = math.ceil(values["hidden_size"] * 8 / 3 / 64) * 64
    width, heads = values["hidden_size"], values["num_attention_heads"]
    if width % (2 * heads):
        mistakes.append(
            (
                "hidden_size",
                f"{width} can't be shared by num_attention_heads {heads}: each head needs an "
                f"even width, so it must be a multiple of {2 * heads}",
            )
        )
    if heads % values["num_key_value_heads"]:
        mistakes.append(
            (
                "num_key_value_heads",
                f"num_attention_heads {heads} is not a multiple of {values['num_key_value_heads']}",
            )
        )
    return mistakes


def _length(values: dict[str, Any], given: Values) -> list[tuple[str, str]]:
    mistakes = []
    for first, second in (("num_train_epochs", "max_steps"), ("warmup_steps", "warmup_ratio")):
        if given.get(first) and given.get(second):
            mistakes.append((second, f"it says the same as {first}; give one of them"))
        elif given.get(second):
            values[first] = None
        else:
            values[second] = None
    return mistakes


def _batch(values: dict[str, Any], given: Values, setting: Setting) -> list[tuple[str, str]]:
    """Complete the batch arithmetic: global = per device * data-parallel size * accumulation."""
    layout = _layout(values)
    copies, rest = divmod(setting.processes, layout.model)
    shared = layout.model > 1
    if rest or not copies:
        name = max(_SHARES_A_COPY, key=lambda name: values.get(name) or 1)
        return [
            (
                name,
                f"{layout.model} processes share each copy of the model, and {setting.processes} "
                f"(nodes * processes of resources) are no multiple of that"
                + _advice(layout, values, given, setting),
            )
        ]
    size = given.get("data_parallel_size")
    if size not in (None, copies):
        each = f"{layout.model} of them share" if shared else "each of them has"
        return [
            (
                "data_parallel_size",
                f"it is {size}, but resources gives {setting.processes} processes (nodes * "
                f"processes), and {each} a copy of the model",
            )
        ]
    values["data_parallel_size"] = copies
    layout = replace(layout, data=copies)
    total, device, passes = (given.get(name) for name in BATCH)
    if device is not None and passes is not None:
        product = device * copies * passes
        if total not in (None, product):
            return [
                (
                    "global_batch_size",
                    f"it is {total}, but per_device_train_batch_size {device} * data-parallel "
                    f"size {copies} * gradient_accumulation_steps {passes} = {product}; leave one "
                    "of the three out",
                )
            ]
        total = product
    elif device is not None and total is None:
        total, passes = device * copies, 1
    else:
        total = values["global_batch_size"] if total is None else total
        known_name = BATCH[1] if device is not None else BATCH[2]
        known = device if device is not None else passes or layout.default_passes(total)
        other, rest = divmod(total, known * copies)
        if rest or not other:
            return [
                (
                    "global_batch_size",
                    f"{total} is not a multiple of {known * copies} = data-parallel size {copies} "
                    f"* {known_name} {known}" + _advice(layout, values, given, setting),
                )
            ]
        device, passes = (known, other) if device is not None else (other, known)
    values.update(zip(BATCH, (total, device, passes), strict=True))
    shape = _shape(values, given)
    if shape is None:
        return []
    return [
        (name, message + _advice(layout, values, given, setting))
        for name, message in layout.mistakes(shape)
    ]


_SHARES_A_COPY = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


def _layout(values: Values) -> Layout:
    """How processes share a copy of the model; how many copies there are is not known yet."""
    tensor, pipeline, context = (values.get(name) or 1 for name in _SHARES_A_COPY)
    return Layout(
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        virtual=values.get("virtual_pipeline_stages") or 1,
        sequence=values.get("sequence_parallel") or False,
    )


def _shape(values: Values, given: Values) -> Shape | None:
    """What a layout must divide; None where an existing model, or another engine, decides."""
    if values.get("num_hidden_layers") is None or "tensor_parallel_size" not in values:
        return None
    return Shape(
        layers=values["num_hidden_layers"],
        heads=values["num_attention_heads"],
        key_value_heads=values["num_key_value_heads"],
        intermediate=values["intermediate_size"],
        length=values["max_length"],
        batch=values["global_batch_size"],
        micro_batch=given.get("per_device_train_batch_size"),
        passes=given.get("gradient_accumulation_steps"),
    )


def _advice(layout: Layout, values: Values, given: Values, setting: Setting) -> str:
    """The nearest layout that works, in words, where the model is known."""
    shape = _shape(values, given)
    if shape is None:
        return ""
    found = layout.nearest(shape, setting.processes)
    if found is None:
        return f"; no layout of {setting.processes} processes fits this model and batch"
    return f"; the nearest layout that works: {found}"


_CONFLICTING = (
    "bf16",
    "fsdp",
    "max_grad_norm",
    "offload",
    "zero_stage",
    "max_length",
    "sequence_parallel",
    "virtual_pipeline_stages",
    *_SHARES_A_COPY,
    "data_parallel_size",
    "fp16",
    "frozen_layers",
    "group_by_length",
    "max_steps",
    "num_frozen_layers",
    "num_hidden_layers",
    "num_top_layers",
    "num_train_epochs",
    "num_attention_heads",
)


def _conflicts(values: Values, given: Values, setting: Setting) -> list[tuple[str, str]]:
    mistakes = []
    if values["fp16"] and values["bf16"]:
        mistakes.append(("bf16", "a training is in fp16 or in bf16, not in both"))
    if values["group_by_length"] and setting.packing:
        mistakes.append(
            (
                "group_by_length",
                "with packing all sequences have the same length; set train.data.packing to false",
            )
        )
    if values["lr_scheduler_type"] == "reduce_on_plateau" and values["eval_strategy"] == "no":
        mistakes.append(
            ("lr_scheduler_type", "reduce_on_plateau needs evaluations, but eval_strategy is no")
        )
    for bound in ("lr_end", "lr_base"):
        if (values[bound] or 0) > values["learning_rate"]:
            mistakes.append(
                (bound, f"{values[bound]:g} is above learning_rate {values['learning_rate']:g}")
            )
    if values.get("fine_tuning_method") == "freeze":
        count, listed = values["num_frozen_layers"], values["frozen_layers"]
        if (count is None) == (listed is None):
            mistakes.append(
                (
                    "fine_tuning_method",
                    "freeze needs one of num_frozen_layers and frozen_layers",
                )
            )
    if values.get("fsdp") and values["fp16"]:
        mistakes.append(("fsdp", "it has no loss scaling, which fp16 needs; take bf16"))
    if values.get("fine_tuning_method") == "prompt_tuning":
        if values.get("fsdp"):
            mistakes.append(("fsdp", "prompt_tuning needs whole weights; leave fsdp out"))
        if values.get("zero_stage") == 3:
            mistakes.append(("zero_stage", "prompt_tuning needs whole weights; take 2 or less"))
    needed = {"optimizer": (1, 2, 3), "all": (3,)}.get(values.get("offload") or "none", ())
    if needed and values["zero_stage"] not in needed:
        mistakes.append(
            (
                "offload",
                f"{values['offload']} needs zero_stage {' or '.join(map(str, needed))}, and it is "
                f"{values['zero_stage']}",
            )
        )
    if setting.engine == "deepspeed":
        mistakes += contradictions(setting.deepspeed, values)
    layers = values["num_hidden_layers"]
    if layers is not None:
        for name, top in (
            ("num_frozen_layers", values.get("num_frozen_layers")),
            ("frozen_layers", max(values.get("frozen_layers") or [0]) + 1),
            ("num_top_layers", values.get("num_top_layers")),
        ):
            if given.get(name) is not None and top is not None and top > layers:
                mistakes.append((name, f"the model has only {layers} layers (num_hidden_layers)"))
    return mistakes


def _short(value: float | None) -> str:
    return "" if value is None else f"{value:.10g}"


def _shown(value: Any) -> str:
    text = "null" if value is None else repr(value)
    if isinstance(value, bool):
        text = "true" if value else "false"
    return text if len(text) <= 60 else text[:57] + "…"
