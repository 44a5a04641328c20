"""How a training is spread over GPUs, and what forbids a layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpcml.layout import Layout as Shares
from hpcml.layout import Shape
from hpcml.plan.training.learning import Part
from hpcml.plan.training.model import Model

Recompute = Literal["none", "selective", "full"]
Offload = Literal["none", "optimizer", "all"]

#: Values of 32 bits that an optimizer keeps for each weight.
_STATES = {"sgd": 0, "adam": 2, "adamw": 2, "rmsprop": 1, "adagrad": 1}


@dataclass(frozen=True)
class Training:
    """What is trained, on whatever hardware.

    Attributes:
        model: the model.
        parts: its tensors, and which of them learn.
        length: tokens of a sequence.
        global_batch: sequences of a step.
        steps: steps of the training; None where the data decides.
        half: whether it computes in 16 bits, with 32 bits where these matter.
        optimizer_values: values of 32 bits that the optimizer keeps for each weight.
        dropout: whether masks of dropped activations are kept.
        flash: whether attention is computed without keeping its s x s scores (Dao et al.,
            "FlashAttention", 2022).
        save_steps: steps between two checkpoints, if the recipe counts them.
        save_interval: seconds between two checkpoints, if the recipe gives them.
    """

    model: Model
    parts: tuple[Part, ...]
    length: int
    global_batch: int
    steps: int | None = None
    half: bool = False
    optimizer_values: int = 2
    dropout: bool = False
    flash: bool = True
    save_steps: int | None = None
    save_interval: int | None = None

    @property
    def parameters(self) -> int:
        """All weights, those included that are added."""
        return sum(part.copies * tensor.numel for part in self.parts for tensor in part.tensors)

    @property
    def learning(self) -> int:
        """The weights that learn."""
        return sum(
            part.copies * tensor.numel
            for part in self.parts
            for tensor in part.tensors
            if part.learns
        )


@dataclass(frozen=True)
class Layout:
    """How a training is spread.

    Attributes:
        engine: what trains.
        data: copies of the model, or groups of GPUs that share one.
        tensor, pipeline, context: GPUs that share a layer, the layers, a sequence.
        virtual: parts of the model that each pipeline stage holds in turn.
        sequence_parallel: whether what lies between the tensor-parallel matrices is shared too.
        micro_batch: sequences of one forward pass.
        passes: forward passes of a step (of each data-parallel rank).
        recompute: activations that the backward pass computes again: none, those of attention's
            core, or all but the inputs of layers.
        zero_stage: what DeepSpeed shards over data-parallel ranks.
        offload: what DeepSpeed keeps in the host's memory.
        fsdp: whether torch shards weights, gradients and optimizer states.
    """

    engine: str
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    context: int = 1
    virtual: int = 1
    sequence_parallel: bool = False
    micro_batch: int = 1
    passes: int = 1
    recompute: Recompute = "none"
    zero_stage: int = 0
    offload: Offload = "none"
    fsdp: bool = False

    @property
    def world(self) -> int:
        """GPUs, one for each process."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def bubble(self) -> float:
        """Waiting of a pipeline's stages, as a part of the time that they compute.

        (p - 1) / (v m) for p stages of v parts and m micro-batches: Narayanan et al., "Efficient
        large-scale language model training on GPU clusters using Megatron-LM" (2021), section 2.2.
        """
        return (self.pipeline - 1) / (self.virtual * self.passes)

    def words(self) -> str:
        """The layout in words, such as ``tp 8, pp 4, dp 16``."""
        if self.engine == "megatron":
            words = [f"tp {self.tensor}", f"pp {self.pipeline}"]
            words += [f"vpp {self.virtual}"] if self.virtual > 1 else []
            words += [f"cp {self.context}"] if self.context > 1 else []
            words.append(f"dp {self.data}")
            return ", ".join(words)
        if self.engine == "deepspeed":
            words = [f"zero {self.zero_stage}"]
            words += [f"offload {self.offload}"] if self.offload != "none" else []
            return ", ".join([*words, f"dp {self.data}"])
        return f"{'fsdp' if self.fsdp else 'ddp'} {self.data}"

    def settings(self) -> dict[str, Any]:
        """The hyperparameters that give this layout."""
        values: dict[str, Any] = {"per_device_train_batch_size": self.micro_batch}
        if self.engine == "megatron":
            values |= {
                "tensor_parallel_size": self.tensor,
                "pipeline_parallel_size": self.pipeline,
            }
            if self.context > 1:
                values["context_parallel_size"] = self.context
            if self.virtual > 1:
                values["virtual_pipeline_stages"] = self.virtual
            if self.tensor > 1:
                values["sequence_parallel"] = self.sequence_parallel
        elif self.engine == "deepspeed":
            values["zero_stage"] = self.zero_stage
        if self.offload != "none":
            values["offload"] = self.offload
        if self.fsdp:
            values["fsdp"] = True
        return {**values, "gradient_checkpointing": self.recompute == "full"}


def optimizer_values(parameters: Mapping[str, Any]) -> int:
    """Values of 32 bits that the optimizer keeps for each weight; momentum is one more."""
    name = parameters.get("optim") or "adamw"
    return _STATES[name] + (1 if parameters.get("momentum") else 0)


def layout_of(engine: str, parameters: Mapping[str, Any], world: int) -> Layout:
    """The layout that resolved hyperparameters describe, on ``world`` processes.

    It may be one that is impossible: see :func:`mistakes`.
    """

    def size(name: str) -> int:
        return parameters.get(name) or 1

    tensor, pipeline = size("tensor_parallel_size"), size("pipeline_parallel_size")
    context = size("context_parallel_size")
    data = parameters.get("data_parallel_size") or max(1, world // (tensor * pipeline * context))
    batch = parameters["global_batch_size"]
    micro = parameters.get("per_device_train_batch_size") or 1
    return Layout(
        engine=engine,
        data=data,
        tensor=tensor,
        pipeline=pipeline,
        context=context,
        virtual=size("virtual_pipeline_stages"),
        sequence_parallel=bool(parameters.get("sequence_parallel")),
        micro_batch=micro,
        passes=parameters.get("gradient_accumulation_steps") or max(1, batch // (data * micro)),
        recompute=_recompute(parameters.get("gradient_checkpointing")),
        zero_stage=parameters.get("zero_stage") or 0,
        offload=parameters.get("offload") or "none",
        fsdp=bool(parameters.get("fsdp")),
    )


def _recompute(value: Any) -> Recompute:
    if value in ("selective", "full"):
        return value  # type: ignore[no-any-return]
    return "full" if value is True else "none"


def mistakes(layout: Layout, training: Training, world: int, gpus_per_node: int) -> Iterator[str]:
    """What forbids a layout, in words; nothing if it is possible.

    Args:
        layout: the layout.
        training: what is to be trained.
        world: the processes that the recipe asks for.
        gpus_per_node: those of them on one node.
    """
    model, tensor = training.model, layout.tensor
    if layout.world != world:
        yield (
            f"tp {tensor} * pp {layout.pipeline} * cp {layout.context} * dp {layout.data} = "
            f"{layout.world} processes, but resources gives {world}"
        )
    if tensor > gpus_per_node:
        yield (
            f"tensor_parallel_size {tensor} is more than the {gpus_per_node} GPUs of a node, and "
            "between nodes it is too slow"
        )
    shares = Shares(
        tensor=tensor,
        pipeline=layout.pipeline,
        context=layout.context,
        data=layout.data,
        virtual=layout.virtual,
        sequence=layout.sequence_parallel,
    )
    shape = Shape(
        layers=model.layers,
        heads=model.heads,
        key_value_heads=model.kv_heads,
        intermediate=model.intermediate,
        length=training.length,
        batch=training.global_batch,
        micro_batch=layout.micro_batch,
        passes=layout.passes,
    )
    for name, message in shares.mistakes(shape):
        yield f"{name}: {message}"
