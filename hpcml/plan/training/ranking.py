"""The layouts that fit a GPU, the fastest first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from hpcml.plan.training.compute import step_flops
from hpcml.plan.training.layout import Layout, Training, mistakes
from hpcml.plan.training.memory import Memory, largest
from hpcml.recipe.hyperparameters import BY_NAME

#: Tokens of a sequence that context parallelism leaves on a GPU at least: below, what it exchanges
#: takes longer than what it spares.
_SHARED_LENGTH = 4096

#: Virtual stages multiply what a pipeline exchanges.
_MOST_VIRTUAL = 4


@dataclass(frozen=True)
class Choice:
    """A layout that is possible.

    Attributes:
        layout: the layout.
        memory: of its fullest GPU.
        work: operations of a step, those included for which a bubble would have had time.
    """

    layout: Layout
    memory: Memory
    work: float


def choices(training: Training, like: Layout, gpus_per_node: int, room: int | None) -> list[Choice]:
    """The layouts that fit, the best first: one for each way to divide the model.

    The best is the fastest. Of equal ones it is the one that divides the least, since dividing
    costs communication that isn't counted, then the one with the largest micro-batch. Layouts
    that keep something in the host's memory come last.

    Args:
        training: what is trained.
        like: the engine, and the number of GPUs.
        gpus_per_node: tensor parallelism does not reach farther.
        room: bytes of a GPU; None takes what would fit any.
    """
    found = []
    for division in _divisions(training, like, gpus_per_node):
        if not _can_be_said(division):
            continue
        variants = [
            layout
            for layout in _variants(training, division)
            if not any(mistakes(layout, training, like.world, gpus_per_node))
        ]
        if room is not None and variants:
            # Nothing fits if the one with the least does not.
            least = max(variants, key=_thrift)
            if largest(training, least).total > room:
                continue
        for layout in sorted(variants, key=lambda layout: _order(training, layout)):
            needed = largest(training, layout)
            if room is None or needed.total <= room:
                found.append(Choice(layout, needed, _work(training, layout)))
                break
    return sorted(found, key=lambda choice: _order(training, choice.layout))


def nearest(given: Layout, among: Iterable[Choice]) -> Choice | None:
    """The choice that differs least from a layout, by factors of its sizes; None of no choices."""

    def distance(choice: Choice) -> tuple[float, float]:
        layout = choice.layout
        sizes = [
            (getattr(layout, name), getattr(given, name))
            for name in ("tensor", "pipeline", "context", "virtual")
        ]
        far = sum(abs(math.log2(one / other)) for one, other in sizes)
        # A micro-batch is changed more easily than how the model is divided.
        far += abs(math.log2(layout.micro_batch / given.micro_batch)) / 4
        far += abs(layout.zero_stage - given.zero_stage) + (layout.fsdp != given.fsdp)
        far += (layout.recompute != given.recompute) + 2 * (layout.offload != given.offload)
        return far, choice.work

    return min(among, key=distance, default=None)


def _can_be_said(layout: Layout) -> bool:
    """Whether a recipe can ask the engine for it."""
    rows = [BY_NAME.get(name) for name in layout.settings()]
    return all(row is not None and layout.engine in row.engines for row in rows)


def _work(training: Training, layout: Layout) -> float:
    return step_flops(training, layout.recompute) * (1 + layout.bubble)


def _order(training: Training, layout: Layout) -> tuple[float, ...]:
    return (
        ("none", "optimizer", "all").index(layout.offload),
        _work(training, layout),
        layout.tensor * layout.pipeline * layout.context,
        layout.virtual,
        layout.zero_stage + layout.fsdp,
        -layout.micro_batch,
    )


def _thrift(layout: Layout) -> tuple[float, ...]:
    return (layout.recompute == "full", -layout.virtual, -layout.micro_batch)


def _divisions(training: Training, like: Layout, gpus_per_node: int) -> Iterator[Layout]:
    """The ways to divide the model among the GPUs; micro-batches are for :func:`_variants`."""
    world = like.world
    if like.engine == "torch":
        for fsdp in (False, True)[: min(2, world)]:
            yield Layout("torch", data=world, fsdp=fsdp)
        return
    if like.engine == "deepspeed":
        for stage in range(4):
            yield Layout("deepspeed", data=world, zero_stage=stage)
            if stage:
                yield Layout("deepspeed", data=world, zero_stage=stage, offload="optimizer")
            if stage == 3:
                yield Layout("deepspeed", data=world, zero_stage=stage, offload="all")
        return
    for tensor in _divisors(math.gcd(gpus_per_node, world)):
        for pipeline in _divisors(math.gcd(training.model.layers, world // tensor)):
            for context in _divisors(world // (tensor * pipeline)):
                if context > 1 and training.length // context < _SHARED_LENGTH:
                    continue
                data = world // (tensor * pipeline * context)
                yield Layout(
                    "megatron", data, tensor, pipeline, context, sequence_parallel=tensor > 1
                )


def _variants(training: Training, division: Layout) -> Iterator[Layout]:
    """Sizes of micro-batches, virtual stages and what is computed again."""
    batch = training.global_batch // division.data
    virtuals = [1]
    if division.pipeline > 1:
        rounds = training.model.layers // division.pipeline
        virtuals = [each for each in _divisors(rounds) if each <= _MOST_VIRTUAL]
    for micro in (1, 2, 4, 8, 16, 32, 64):
        if not batch or batch % micro:
            continue
        for virtual in virtuals:
            for recompute in ("none", "selective", "full"):
                if recompute == "selective" and (training.flash or division.engine != "megatron"):
                    continue  # there is nothing to select
                yield replace(
                    division,
                    micro_batch=micro,
                    passes=batch // micro,
                    virtual=virtual,
                    recompute=recompute,
                )


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]
