"""What a training needs, as tables and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hpcml.cli import text
from hpcml.cli.tables import console
from hpcml.plan.training.backfill import checkpoint_bytes
from hpcml.plan.training.estimate import SEGMENTS, Estimate
from hpcml.plan.training.layout import Layout
from hpcml.plan.training.memory import CONTEXT, FRAGMENTATION, gib
from hpcml.plan.training.ranking import Choice
from hpcml.site.schema import Site

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_PARTS = {
    "weights": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer states",
    "activations": "activations",
    "loss": "logits and loss",
    "buffers": "buffers and copies",
    "reserve": "reserve",
}

#: Layouts that are shown.
_LAYOUTS = 8


def print_estimate(title: str, site: Site, estimate: Estimate, cells: int) -> None:
    """Print all about one model and layout.

    Args:
        title: the recipe's name.
        site: where it would run.
        estimate: what it needs.
        cells: cells of the recipe, of which these may be some.
    """
    from rich.padding import Padding

    output = console()
    output.print(_title(title, site, estimate, cells), style="bold", soft_wrap=True)
    for part in (_model, _memory, _speed, _layouts, _checkpoints, _segments):
        output.print()
        part(output, estimate)
    output.print()
    output.print("Assumed", style="bold")
    for line in assumptions(estimate):
        output.print(Padding(line, (0, 0, 0, 2)))
    output.print()


def print_overview(title: str, site: Site, estimates: list[Estimate], cells: int) -> None:
    """Print a line for each of many models and layouts."""
    output = console()
    table = _table(
        "cells", "what differs", ">parameters", "layout", ">GiB", "", ">step", ">training"
    )
    for estimate in estimates:
        differs = ", ".join(f"{name}={text.value(item)}" for name, item in estimate.tells.items())
        table.add_row(
            str(len(estimate.cells)),
            text.short(differs, 60),
            _count(estimate.training.parameters),
            estimate.layout.words(),
            gib(estimate.fullest.total),
            {True: "fits", False: "does not fit", None: ""}[estimate.fits],
            _time(estimate.seconds()),
            text.duration(estimate.duration),
        )
    output.print(f"{title} on {site.name}: {cells} cells, {len(estimates)} models and layouts")
    _print(output, table)
    output.print("Give --set params.NAME=VALUE to see one of them in full.")


def assumptions(estimate: Estimate) -> Iterator[str]:
    """What is not known and was assumed, or not counted, a sentence each."""
    training, layout, hardware = estimate.training, estimate.layout, estimate.hardware
    if training.flash:
        yield "Attention does not keep its scores (Transformer Engine, flash attention, sdpa)."
    if hardware.gpus:
        yield (
            f"Reserve: {gib(CONTEXT)} GiB for CUDA, NCCL and libraries, and "
            f"{FRAGMENTATION:.0%} of the rest for what the allocator loses."
        )
    if layout.engine == "torch" and training.half and not layout.fsdp:
        yield "Weights, gradients and optimizer states have 32 bits; autocast computes in 16."
    if layout.offload != "none":
        yield "Times do not know of offloading, which is slower."
    if hardware.speed is not None:
        yield (
            f"A GPU reaches {hardware.speed.mfu:.0%} of its {hardware.speed.tflops:g} TFLOP/s "
            "while it computes, however the work is divided; a bubble of the pipeline comes on top."
        )
    yield (
        f"The storage writes {gib(hardware.write_speed)} and reads {gib(hardware.read_speed)} "
        f"GiB/s for a job; a node fails once in {text.duration(hardware.node_mtbf)}."
    )
    yield (
        f"A job's first step comes {text.duration(estimate.costs.startup)} after its start, and "
        "reading the checkpoint on top of it. Nobody knows the time in queues."
    )


def _title(title: str, site: Site, estimate: Estimate, cells: int) -> str:
    hardware = estimate.hardware
    where = f"{site.name}, partition {hardware.partition}" if hardware.partition else site.name
    nodes = f"{hardware.nodes} {'node' if hardware.nodes == 1 else 'nodes'}"
    if hardware.gpus:
        size = f", {gib(hardware.memory)} GiB" if hardware.memory else ""
        kind = f" ({hardware.gpu or 'kind not known'}{size})"
        each = f"{hardware.gpus} {'GPU' if hardware.gpus == 1 else 'GPUs'}{kind}"
    else:
        each = f"{hardware.processes} {'process' if hardware.processes == 1 else 'processes'}"
    told = ", ".join(f"{name}={text.value(item)}" for name, item in estimate.tells.items())
    own = len(estimate.cells)
    which = f"{own} of {cells} cells ({told})" if told else f"{own} cells" if own > 1 else "1 cell"
    return f"{title} on {where}: {nodes} of {each}; {which}"


def _model(output: Console, estimate: Estimate) -> None:
    training = estimate.training
    counts = training.model.counts()
    output.print("Parameters", style="bold")
    table = _table("", ">parameters")
    table.add_row("total", f"{counts['total']:,}")
    table.add_row("  embedding", f"{counts['embedding']:,}")
    table.add_row("  head", f"{counts['head']:,}" if counts["head"] else "the embedding (tied)")
    table.add_row(f"  each of {training.model.layers} layers", f"{counts['layer']:,}")
    table.add_row("without embedding and head", f"{counts['non_embedding']:,}")
    if training.learning != counts["total"]:
        table.add_row("that learn", f"{training.learning:,}")
    _print(output, table)


def _memory(output: Console, estimate: Estimate) -> None:
    per = "GPU" if estimate.hardware.gpus else "process"
    output.print(f"Memory of a {per}, GiB", style="bold")
    output.print(f"  {_describe(estimate.layout)}", soft_wrap=True)
    stages = [] if _broken(estimate) else estimate.stages()
    many = estimate.layout.pipeline > 1
    table = _table("", *(f">stage {stage}" if many else ">" for stage, _ in stages))
    for name, title in _PARTS.items():
        sizes = [getattr(needed, name) for _, needed in stages]
        if any(sizes):
            table.add_row(title, *map(gib, sizes))
    table.add_row("total", *(gib(needed.total) for _, needed in stages), style="bold")
    if any(needed.host for _, needed in stages):
        table.add_row("in the host's memory", *(gib(needed.host) for _, needed in stages))
    if stages:
        _print(output, table)
    for mistake in estimate.mistakes:
        output.print(f"  impossible: {mistake}", style="red", soft_wrap=True)
    if not estimate.mistakes:
        output.print(f"  {estimate.verdict()}", style="red" if estimate.fits is False else "green")
    if estimate.fits is False or estimate.mistakes:
        near = estimate.nearest
        if near is None:
            output.print("  no layout of these GPUs fits", style="red")
        else:
            words = f"the nearest that fits: {_describe(near.layout)}"
            output.print(f"  {words}: {gib(near.memory.total)} GiB", soft_wrap=True)
            named = [f"{name} {json.dumps(each)}" for name, each in near.layout.settings().items()]
            output.print(f"  that is: {', '.join(named)}", soft_wrap=True)


def _broken(estimate: Estimate) -> bool:
    """Whether the layout is so impossible that its memory can't be said."""
    layout, model = estimate.layout, estimate.training.model
    return bool(model.layers % (layout.pipeline * layout.virtual))


def _speed(output: Console, estimate: Estimate) -> None:
    output.print("Time", style="bold")
    layout, hardware = estimate.layout, estimate.hardware
    step, duration = estimate.seconds(), estimate.duration
    tokens = estimate.tokens
    table = _table("", ">")
    table.add_row("a step", f"{tokens:,} tokens, {estimate.flops:.3g} FLOP")
    if layout.bubble:
        table.add_row("bubble of the pipeline", f"{layout.bubble:.1%} on top")
    if step is not None:
        table.add_row("", f"{_time(step)}, {tokens / step:,.0f} tokens/s")
    steps = estimate.training.steps
    if steps is not None:
        table.add_row("the training", f"{steps:,} steps, {_count(steps * tokens)} tokens")
    if duration is not None:
        hours = duration / 3600 * layout.world
        table.add_row("", f"{text.duration(duration)}, {hours:,.0f} GPU hours")
    _print(output, table)
    if step is None:
        what = "the site does not say what GPU it is" if hardware.gpus else "it trains on CPUs"
        output.print(f"  how long is not known: {what}")
    if steps is None:
        output.print("  the data decides how many steps there are; params.max_steps would say it")


def _layouts(output: Console, estimate: Estimate) -> None:
    choices = estimate.choices
    if estimate.hardware.memory is None:
        output.print("Layouts", style="bold")
        output.print("  which ones fit is not known without the memory of a GPU")
        return
    output.print("Layouts that fit, the fastest first", style="bold")
    given, best = estimate.layout, choices[:_LAYOUTS]
    table = _table("", "layout", ">micro-batch", "recompute", ">GiB", ">bubble", ">step")
    for choice in best:
        table.add_row(*_row(estimate, choice, "*" if choice.layout == given else ""))
    if not any(choice.layout == given for choice in best) and not _broken(estimate):
        own = Choice(given, estimate.fullest, 0)
        table.add_row(*_row(estimate, own, "*"), style=None if estimate.fits else "red")
    _print(output, table)
    output.print("  * the recipe's" + (f"; {len(choices)} fit" if len(choices) > _LAYOUTS else ""))


def _row(estimate: Estimate, choice: Choice, mark: str) -> list[str]:
    layout = choice.layout
    return [
        mark,
        layout.words(),
        str(layout.micro_batch),
        layout.recompute,
        gib(choice.memory.total),
        f"{layout.bubble:.1%}" if layout.bubble else "",
        _time(estimate.seconds(layout)),
    ]


def _checkpoints(output: Console, estimate: Estimate) -> None:
    output.print("Checkpoints", style="bold")
    costs = estimate.costs
    size = checkpoint_bytes(estimate.training, estimate.layout)
    table = _table("", ">")
    table.add_row("size", f"{gib(size)} GiB")
    table.add_row("a save", _time(costs.save))
    table.add_row("the signal's lead", text.duration(costs.lead))
    table.add_row("failures of the job", f"one in {text.duration(costs.mtbf)}")
    table.add_row("best interval (Young, Daly)", _interval(estimate, costs.best))
    training = estimate.training
    if training.save_steps:
        how = f"save_steps {training.save_steps}"
    else:
        how = "checkpoint.interval" if training.save_interval else "checkpoint.interval: auto"
    known = not training.save_steps or estimate.seconds()
    table.add_row(f"the recipe's ({how})", _interval(estimate, costs.interval) if known else "")
    _print(output, table)
    if costs.lead < costs.save:
        output.print(
            f"  the signal comes {text.duration(costs.lead)} before a job's end, and a save takes "
            f"{_time(costs.save)}: the site's signal.lead must be longer",
            style="red",
            soft_wrap=True,
        )


def _interval(estimate: Estimate, seconds: float) -> str:
    step = estimate.seconds()
    steps = f", {max(1, round(seconds / step)):,} steps" if step else ""
    return f"{text.duration(seconds)}{steps}"


def _segments(output: Console, estimate: Estimate) -> None:
    output.print("Jobs of a limited length", style="bold")
    own = estimate.time
    lengths = sorted({*SEGMENTS, *([own] if own else [])})
    segments = estimate.segments(lengths)
    if not segments:
        output.print("  how many it takes is not known without the time of the training")
        return
    table = _table("", ">length", ">jobs", ">lost in each", ">useful", ">total")
    for each in segments:
        table.add_row(
            "*" if each.length == own else "",
            text.duration(each.length),
            "too short" if each.links is None else f"{each.links:,}",
            "" if each.links is None else text.duration(each.lost),
            "" if each.links is None else f"{each.useful:.1%}",
            text.duration(each.total),
        )
    _print(output, table)
    if own:
        output.print("  * the recipe's resources.time")


def _table(*titles: str) -> Table:
    """A table; ``>`` before a title puts its column to the right."""
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.show_header = any(title.strip(">") for title in titles)
    for title in titles:
        right = title.startswith(">")
        table.add_column(title.lstrip(">"), justify="right" if right else "left", no_wrap=True)
    return table


def _print(output: Console, table: Table) -> None:
    from rich.padding import Padding

    output.print(Padding(table, (0, 0, 0, 2), expand=False))


def _describe(layout: Layout) -> str:
    noun = "sequence" if layout.micro_batch == 1 else "sequences"
    parts = [
        f"{layout.engine}: {layout.words()}",
        f"{layout.passes} x {layout.micro_batch} {noun}",
        "sequence parallel" if layout.sequence_parallel else "",
        f"recompute {layout.recompute}",
    ]
    return ", ".join(part for part in parts if part)


def _count(number: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:.0f}"


def _time(seconds: float | None) -> str:
    """A short time with its fraction, a long one as everywhere."""
    if seconds is None:
        return ""
    if seconds < 0.1:
        return f"{seconds * 1000:.3g} ms"
    return f"{seconds:.3g} s" if seconds < 100 else text.duration(seconds)


def as_document(
    title: str, site: Site, estimates: list[Estimate], unknown: str | None
) -> dict[str, Any]:
    """All of it for programs: sizes in bytes, times in seconds; null is not known."""
    return {
        "recipe": title,
        "site": site.name,
        "unknown": unknown,
        "estimates": [_estimate(estimate) for estimate in estimates],
    }


def _estimate(estimate: Estimate) -> dict[str, Any]:
    training, own = estimate.training, estimate.time
    broken = _broken(estimate)
    return {
        "cells": list(estimate.cells),
        "differs": dict(estimate.tells),
        "hardware": asdict(estimate.hardware),
        "parameters": {**training.model.counts(), "learning": training.learning},
        "layout": _layout(estimate.layout),
        "mistakes": estimate.mistakes,
        "memory": []
        if broken
        else [
            {"stage": stage, **needed._asdict(), "total": needed.total}
            for stage, needed in estimate.stages()
        ],
        "fits": None if broken else estimate.fits,
        "nearest": None if estimate.nearest is None else _layout(estimate.nearest.layout),
        "step": {
            "tokens": estimate.tokens,
            "flops": estimate.flops,
            "seconds": estimate.seconds(),
        },
        "training": {
            "steps": training.steps,
            "seconds": estimate.duration,
            "gpu_hours": None
            if estimate.duration is None
            else estimate.duration / 3600 * estimate.layout.world,
        },
        "layouts": [
            {
                **_layout(choice.layout),
                "memory": choice.memory.total,
                "step_seconds": estimate.seconds(choice.layout),
            }
            for choice in estimate.choices
        ],
        "checkpoint": {
            "bytes": checkpoint_bytes(training, estimate.layout),
            **asdict(estimate.costs),
        },
        "segments": [
            asdict(each) for each in estimate.segments({*SEGMENTS, *([own] if own else [])})
        ],
        "assumed": list(assumptions(estimate)),
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {**asdict(layout), "bubble": layout.bubble, "params": layout.settings()}
