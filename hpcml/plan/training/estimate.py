"""A training recipe on a site: what each of its models and layouts will need."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hpcml.interval import automatic_interval, optimal_interval
from hpcml.plan.resources import Resources
from hpcml.plan.training.backfill import (
    Costs,
    Segments,
    checkpoint_bytes,
)
from hpcml.plan.training.backfill import segments as in_segments
from hpcml.plan.training.compute import Speed, step_flops, step_seconds
from hpcml.plan.training.kinds import kinds
from hpcml.plan.training.layout import Layout, Training, mistakes
from hpcml.plan.training.memory import Memory, gib, largest, memory, verdict
from hpcml.plan.training.ranking import Choice, choices, nearest
from hpcml.recipe.cell import Cell
from hpcml.recipe.load import LoadedRecipe
from hpcml.site.gpus import known
from hpcml.site.schema import Partition, Site

#: Lengths of jobs that are compared, in seconds.
SEGMENTS = (1800, 3600, 7200, 4 * 3600, 8 * 3600, 24 * 3600)


@dataclass(frozen=True)
class Hardware:
    """What the processes of a cell get.

    Attributes:
        nodes: nodes of a job.
        processes: of each node.
        gpus: of each node; 0 trains on CPUs.
        partition: the partition's name, where there is one.
        gpu: the kind of GPU, where it is known.
        memory: bytes of a GPU, where they are known.
        speed: of a GPU, where it is known.
        lead: seconds between the signal and a job's end.
        write_speed, read_speed: bytes a second of the storage.
        node_mtbf: seconds between two failures of a node.
    """

    nodes: int
    processes: int
    gpus: int
    partition: str | None
    gpu: str | None
    memory: int | None
    speed: Speed | None
    lead: int
    write_speed: int
    read_speed: int
    node_mtbf: int


def hardware_of(
    site: Site, partition: Partition | None, resources: Resources, lead: int
) -> Hardware:
    """What a job of a site has; a site without partitions does not say what its GPUs are."""
    kind = known(partition.gpu_type) if partition else None
    size = tflops = speed = None
    if resources.gpus and partition:
        size = partition.gpu_memory or (kind.memory if kind else None)
        tflops = partition.gpu_tflops or (kind.tflops if kind else None)
        speed = Speed(tflops, partition.mfu) if tflops else None
    return Hardware(
        nodes=resources.nodes,
        processes=resources.processes,
        gpus=resources.gpus,
        partition=partition.name if partition else None,
        gpu=(kind.name if kind else partition.gpu_type) if partition and resources.gpus else None,
        memory=size,
        speed=speed,
        lead=lead,
        write_speed=site.storage.write_speed,
        read_speed=site.storage.read_speed,
        node_mtbf=site.node_mtbf,
    )


@dataclass(frozen=True)
class Estimate:
    """What a model in a layout needs. Times are None where the GPU's speed isn't known.

    Attributes:
        cells: numbers of the cells that it is for.
        tells: the swept parameters that tell it from the recipe's other estimates.
        training, layout: what is trained, and how the recipe spreads it.
        hardware: what it gets.
        time: seconds that a job may run, if the recipe says it.
    """

    cells: tuple[int, ...]
    tells: Mapping[str, Any]
    training: Training
    layout: Layout
    hardware: Hardware
    time: int | None = None

    @cached_property
    def mistakes(self) -> list[str]:
        """Why the layout is impossible."""
        nodes = self.hardware.nodes * self.hardware.processes
        return list(mistakes(self.layout, self.training, nodes, self.hardware.processes))

    def stages(self) -> list[tuple[int, Memory]]:
        """The memory of GPUs of the first, the second and the last pipeline stage."""
        stages = sorted({0, min(1, self.layout.pipeline - 1), self.layout.pipeline - 1})
        return [(stage, self._memory(stage)) for stage in stages]

    def _memory(self, stage: int) -> Memory:
        return memory(self.training, self.layout, stage, on_gpu=self.hardware.gpus > 0)

    @cached_property
    def fullest(self) -> Memory:
        """The memory of the fullest GPU."""
        return largest(self.training, self.layout, on_gpu=self.hardware.gpus > 0)

    @property
    def fits(self) -> bool | None:
        """Whether that fits the GPU; None where nobody knows."""
        room = self.hardware.memory
        return None if room is None else self.fullest.total <= room

    def verdict(self) -> str:
        """Whether it fits, in words."""
        if self.hardware.memory is not None:
            return verdict(self.fullest, self.hardware.memory)
        needs = f"needs {gib(self.fullest.total)} GiB per"
        if not self.hardware.gpus:
            return f"{needs} process (no GPUs)"
        return f"{needs} GPU (the memory of its GPUs is not known)"

    @cached_property
    def choices(self) -> list[Choice]:
        """The layouts of these GPUs that fit, the best first."""
        return choices(self.training, self.layout, self.hardware.processes, self.hardware.memory)

    @cached_property
    def nearest(self) -> Choice | None:
        """The layout that fits and is most like the given one."""
        return nearest(self.layout, self.choices)

    def seconds(self, layout: Layout | None = None) -> float | None:
        """How long a step takes, in this layout or another."""
        speed = self.hardware.speed
        return None if speed is None else step_seconds(self.training, layout or self.layout, speed)

    @property
    def flops(self) -> float:
        """Operations of a step, without those that are repeated."""
        return step_flops(self.training)

    @property
    def tokens(self) -> int:
        """Tokens of a step."""
        return self.training.global_batch * self.training.length

    @property
    def duration(self) -> float | None:
        """Seconds of all steps, without saves; None where steps or speed aren't known."""
        step, steps = self.seconds(), self.training.steps
        return None if step is None or steps is None else step * steps

    @property
    def costs(self) -> Costs:
        """What checkpoints and failures cost."""
        hardware = self.hardware
        size = checkpoint_bytes(self.training, self.layout)
        save, mtbf = size / hardware.write_speed, hardware.node_mtbf / hardware.nodes
        training, step = self.training, self.seconds()
        interval = training.save_interval or automatic_interval(save, mtbf)
        if training.save_steps and step:
            interval = training.save_steps * step
        return Costs(
            save=save,
            restore=size / hardware.read_speed,
            best=optimal_interval(save, mtbf),
            interval=interval,
            mtbf=mtbf,
            lead=hardware.lead,
        )

    def segments(self, lengths: Iterable[int]) -> list[Segments]:
        """The training in jobs of some lengths; empty where its duration isn't known."""
        if self.duration is None:
            return []
        return [in_segments(length, self.duration, self.costs) for length in lengths]


def estimates(loaded: LoadedRecipe, cells: Sequence[Cell], hardware: Hardware) -> list[Estimate]:
    """One estimate for each model and layout among the cells of a training recipe.

    Args:
        loaded: the recipe.
        cells: its cells.
        hardware: what each of them gets.

    Raises:
        UnknownModel: what is trained isn't known yet, or can't be counted.
    """
    world, time = hardware.nodes * hardware.processes, loaded.recipe.resources.time
    return [
        Estimate(kind.cells, kind.tells, kind.training, kind.layout, hardware, time)
        for kind in kinds(loaded, cells, world)
    ]
