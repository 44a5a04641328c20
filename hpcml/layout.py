"""How the processes of a training share a model and its batch: the layout of 3D parallelism.

The recipe checks a layout before anything is submitted, and the training again when it starts, so
this is beside the packages and needs nothing.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Shape:
    """What of a model and a batch must be divisible.

    Attributes:
        layers, heads, key_value_heads, intermediate: of the model.
        length: tokens of a sequence.
        batch: sequences of an update.
        micro_batch: sequences of a forward pass, or None if nobody says.
        passes: forward passes of an update, or None if nobody says.
    """

    layers: int
    heads: int
    key_value_heads: int
    intermediate: int
    length: int
    batch: int
    micro_batch: int | None = None
    passes: int | None = None


@dataclass(frozen=True)
class Layout:
    """How many processes share what.

    Attributes:
        tensor: processes that share each layer.
        pipeline: groups of processes that share the layers among them.
        context: processes that share each sequence.
        data: copies of the model, which share the batch.
        virtual: parts of the model that each stage of the pipeline holds in turn.
        sequence: whether what lies between the layers of a tensor-parallel model is shared too.
    """

    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    data: int = 1
    virtual: int = 1
    sequence: bool = False

    @property
    def processes(self) -> int:
        """All of them."""
        return self.tensor * self.pipeline * self.context * self.data

    @property
    def model(self) -> int:
        """Processes that hold one copy of the model."""
        return self.tensor * self.pipeline * self.context

    def __str__(self) -> str:
        parts = [f"tensor_parallel_size {self.tensor}", f"pipeline_parallel_size {self.pipeline}"]
        if self.context > 1:
            parts.append(f"context_parallel_size {self.context}")
        if self.virtual > 1:
            parts.append(f"virtual_pipeline_stages {self.virtual}")
        if self.sequence:
            parts.append("sequence_parallel")
        return ", ".join([*parts, f"data_parallel_size {self.data}"])

    def passes(self, shape: Shape) -> int | None:
        """Forward passes of an update, or None if the batch can't be divided so."""
        per_copy, rest = divmod(shape.batch, self.data)
        if rest:
            return None
        size = shape.micro_batch or per_copy // (shape.passes or self.default_passes(shape.batch))
        passes = shape.passes or (per_copy // size if size else 0)
        return passes if passes and size * passes == per_copy else None

    def default_passes(self, batch: int) -> int:
        """Forward passes of an update if nobody says: as many as the pipeline has stages, or fewer
        if the batch can't be divided so.
        """
        return max(math.gcd(self.pipeline, batch // self.data), 1)

    def mistakes(self, shape: Shape) -> Iterator[tuple[str, str]]:
        """What of a model or a batch can't be shared so: a parameter, and why not."""
        name = "tensor_parallel_size"
        for what, count in (
            ("num_attention_heads", shape.heads),
            ("num_key_value_heads", shape.key_value_heads),
            ("intermediate_size", shape.intermediate),
        ):
            if count % self.tensor:
                yield name, f"{self.tensor} processes can't share {what} {count}"
        stages = self.pipeline * self.virtual
        if self.virtual > 1 and self.pipeline == 1:
            yield "virtual_pipeline_stages", "it needs pipeline_parallel_size 2 or more"
        elif shape.layers % stages:
            if self.virtual > 1:
                parts = f"{self.pipeline} stages of {self.virtual} parts"
                yield "virtual_pipeline_stages", f"{parts} can't share {shape.layers} layers"
            else:
                name = "pipeline_parallel_size"
                yield name, f"{self.pipeline} stages can't share {shape.layers} layers"
        if self.sequence and self.tensor == 1:
            yield "sequence_parallel", "it needs tensor_parallel_size 2 or more"
        elif self.sequence and shape.length % (self.tensor * self.context):
            yield "sequence_parallel", f"max_length {shape.length} can't be shared so"
        if self.context > 1 and shape.length % (2 * self.context):
            yield "context_parallel_size", f"max_length {shape.length} can't be shared so"
        passes = self.passes(shape)
        if passes is None:
            yield "global_batch_size", self._indivisible(shape)
        elif self.virtual > 1 and passes % self.pipeline:
            yield (
                "virtual_pipeline_stages",
                f"an update has {passes} forward passes (gradient_accumulation_steps), which must "
                f"be a multiple of pipeline_parallel_size {self.pipeline}",
            )

    def _indivisible(self, shape: Shape) -> str:
        known = ""
        if shape.micro_batch:
            known += f" * per_device_train_batch_size {shape.micro_batch}"
        if shape.passes:
            known += f" * gradient_accumulation_steps {shape.passes}"
        return f"{shape.batch} is not a multiple of data-parallel size {self.data}{known}"

    def nearest(self, shape: Shape, processes: int) -> Layout | None:
        """The layout of these processes that fits the model and the batch, and is most like this.

        Returns:
            None if there is none.
        """
        fitting = [
            layout
            for layout in self._others(processes)
            if not any(True for _ in layout.mistakes(shape))
        ]
        return min(fitting, key=self._distance, default=None)

    def _others(self, processes: int) -> Iterator[Layout]:
        for tensor, pipeline in itertools.product(_divisors(processes), repeat=2):
            rest, left = divmod(processes, tensor * pipeline * self.context)
            if left:
                continue
            for virtual in {1, *range(2, self.virtual + 1)}:
                yield replace(
                    self,
                    tensor=tensor,
                    pipeline=pipeline,
                    data=rest,
                    virtual=virtual if pipeline > 1 else 1,
                    sequence=self.sequence and tensor > 1,
                )

    def _distance(self, other: Layout) -> tuple[float, int]:
        pairs = (
            (self.tensor, other.tensor),
            (self.pipeline, other.pipeline),
            (self.virtual, other.virtual),
        )
        far = sum(abs(math.log2(mine / theirs)) for mine, theirs in pairs)
        return far, other.tensor + other.pipeline


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
