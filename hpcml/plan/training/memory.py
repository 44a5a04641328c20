"""The memory of one GPU: weights, gradients, optimizer states, activations.

What the states take is exact: it is what the engines allocate. Activations are those that
autograd keeps; see the functions for what is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from hpcml.plan.training.layout import Layout, Training
from hpcml.plan.training.learning import Part
from hpcml.plan.training.model import Model, Tensor, numel

GIB = 1024**3

#: Bytes of a process that are not tensors: the CUDA context, NCCL's buffers, workspaces of
#: libraries. An assumption; it differs by driver and number of communicators.
CONTEXT = 2 * GIB

#: What the allocator loses between blocks, as a part of what is allocated. An assumption.
FRAGMENTATION = 0.05


class Memory(NamedTuple):
    """Bytes of one GPU by what they are for.

    Attributes:
        weights, gradients, optimizer: with the optimizer, the copy of the weights in 32 bits.
        activations: what the forward passes keep for the backward passes.
        loss: logits, and what their loss needs.
        buffers: for communication, and copies of weights that are made for a while.
        reserve: what is not tensors, and what the allocator loses.
        host: not of the GPU: what is offloaded to the host's memory.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    loss: int = 0
    buffers: int = 0
    reserve: int = 0
    host: int = 0

    @property
    def states(self) -> int:
        """Weights, gradients and optimizer states: what no micro-batch makes smaller."""
        return self.weights + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All of the GPU."""
        return self.states + self.activations + self.loss + self.buffers + self.reserve


def gib(size: float) -> str:
    """Bytes as GiB, with one decimal, or two digits of a small number."""
    number = size / GIB
    return f"{number:.1f}" if number >= 0.95 or not size else f"{number:.2g}"


def verdict(needed: Memory, room: int) -> str:
    """Whether something fits ``room`` bytes of a GPU, in words."""
    of = f"needs {gib(needed.total)} of {gib(room)} GiB per GPU"
    if needed.total > room:
        return f"does not fit: {of}"
    return f"fits: {of}, {gib(room - needed.total)} GiB are left"


def memory(training: Training, layout: Layout, stage: int = 0, on_gpu: bool = True) -> Memory:
    """The memory of a GPU of a pipeline stage.

    Args:
        training, layout: what is trained, and how it is spread.
        stage: from 0.
        on_gpu: False leaves out the reserve, which is about GPUs.
    """
    parts = stage_parts(training, layout, stage)
    states = {
        "torch": _fsdp if layout.fsdp else _replicated,
        "deepspeed": _zero,
        "megatron": _distributed_optimizer,
    }[layout.engine](parts, training, layout)
    kept, loss, transient = (_megatron if layout.engine == "megatron" else _torch)(
        training, layout, stage
    )
    used = states.states + states.buffers + kept + loss + transient
    return Memory(
        weights=states.weights,
        gradients=states.gradients,
        optimizer=states.optimizer,
        activations=kept,
        loss=loss,
        buffers=states.buffers + transient,
        reserve=CONTEXT + int(FRAGMENTATION * used) if on_gpu else 0,
        host=states.host,
    )


def largest(training: Training, layout: Layout, on_gpu: bool = True) -> Memory:
    """The memory of the fullest GPU.

    The first stage has the most micro-batches in flight, the last one the logits; the others are
    below the first.
    """
    stages = {0, layout.pipeline - 1}
    return max(
        (memory(training, layout, stage, on_gpu) for stage in stages), key=lambda found: found.total
    )


def stage_parts(training: Training, layout: Layout, stage: int) -> tuple[Part, ...]:
    """What a pipeline stage holds of the model.

    A tied head is a second copy of the embedding, on the last stage, whose gradients are added to
    those of the first.
    """
    if layout.pipeline == 1:
        return training.parts
    model = training.model
    parts = [Part("layer", model.layer, model.layers // layout.pipeline)]
    if stage == 0:
        parts.insert(0, Part("embedding", model.embedding))
    if stage == layout.pipeline - 1:
        tied = model.embedding[:1] if model.tied else ()
        parts.append(Part("head", (*model.head, *tied)))
    return tuple(parts)


# -- weights, gradients, optimizer states ---------------------------------------------------------


def _count(parts: Iterable[Part], learning: bool = False) -> int:
    return sum(p.copies * numel(p.tensors) for p in parts if p.learns or not learning)


def _replicated(parts: tuple[Part, ...], training: Training, layout: Layout) -> Memory:
    """DistributedDataParallel: everything in 32 bits on each GPU.

    With several processes, the gradients are in the buckets once more that are exchanged (torch's
    documentation of ``gradient_as_bucket_view``, which is off).
    """
    learning = 4 * _count(parts, learning=True)
    return Memory(
        weights=4 * _count(parts),
        gradients=learning,
        optimizer=training.optimizer_values * learning,
        buffers=learning if layout.data > 1 else 0,
    )


def _fsdp(parts: tuple[Part, ...], training: Training, layout: Layout) -> Memory:
    """FSDP2 (``fully_shard``): the rows of each tensor are divided, in 32 bits; rank 0 has most.

    For computing, weights are gathered in the precision of the computation: two layers (one in
    use, one ahead) and what is outside of layers, and the gradients of one layer before they are
    divided.
    """

    def share(tensor: Tensor) -> int:
        return -(-tensor.shape[0] // layout.data) * math.prod(tensor.shape[1:])

    weights = sum(part.copies * share(tensor) for part in parts for tensor in part.tensors)
    learning = sum(
        part.copies * share(tensor) for part in parts if part.learns for tensor in part.tensors
    )
    layer = numel(training.model.layer)
    outside = numel(training.model.embedding) + numel(training.model.head)
    gathered = (2 * layer + outside) * (2 if training.half else 4)
    return Memory(
        weights=4 * weights,
        gradients=4 * learning,
        optimizer=training.optimizer_values * 4 * learning,
        buffers=gathered + 4 * layer if layout.data > 1 else 0,
    )


#: Elements of DeepSpeed's buffers, where its configuration leaves them at their defaults
#: (reduce_bucket_size, stage3_prefetch_bucket_size).
BUCKET = 500_000_000


def _zero(parts: tuple[Part, ...], training: Training, layout: Layout) -> Memory:
    """DeepSpeed: 2 + 2 + 12 bytes a weight with Adam in 16 bits (Rajbhandari et al., "ZeRO", 2020).

    Stage 1 divides the last by the number of data-parallel ranks, stage 2 the second too, stage 3
    all. In 32 bits it is 4 + 4 + 8, and 12 from stage 1 on, where the divided copy is another one.
    Stages 1 and 2 pad the flat tensor of each parameter group to twice the ranks, stage 3 each
    tensor to the ranks. Not counted: stage 2 may keep the gradients of a tensor that lies across
    two ranks whole on both.
    """
    stage, ranks = layout.zero_stage, layout.data
    element = 2 if training.half else 4
    tensors = [(part, tensor) for part in parts for tensor in part.tensors]
    if stage == 3:
        whole = sum(part.copies * -(-t.numel // ranks) for part, t in tensors)
        learning = sum(part.copies * -(-t.numel // ranks) for part, t in tensors if part.learns)
        share = learning
    else:
        whole, learning = _count(parts), _count(parts, learning=True)
        share = learning if stage == 0 else _flat_share(parts, ranks)
    master = 4 if training.half or stage else 0
    optimizer = share * (master + 4 * training.optimizer_values)
    gradients = element * (share if stage >= 2 else learning)
    # The weights are views of the flat tensors.
    weights = element * (share * ranks if stage in (1, 2) and whole == learning else whole)
    bucket = min(BUCKET, _count(parts, learning=True)) * element if ranks > 1 else 0
    buffers = bucket
    if stage == 3 and ranks > 1:
        layer = max(numel(part.tensors) for part in parts)
        buffers += (min(BUCKET, _count(parts)) + layer) * element
    host = 0
    if layout.offload != "none":
        host, optimizer = optimizer, 0
        # Gradients go to the host as they are reduced, bucket by bucket.
        if stage >= 2:
            host, gradients = host + gradients, 0
    if layout.offload == "all":
        host, weights = host + weights, 0
    return Memory(weights, gradients, optimizer, buffers=buffers, host=host)


def _flat_share(parts: Iterable[Part], ranks: int) -> int:
    """Elements of each rank of the flat tensors: one for what decays, one for what doesn't."""
    share = 0
    for vector in (False, True):
        elements = sum(
            part.copies * tensor.numel
            for part in parts
            if part.learns
            for tensor in part.tensors
            if (len(tensor.shape) == 1) == vector
        )
        share += -(-elements // (2 * ranks)) * 2
    return share


def _distributed_optimizer(parts: tuple[Part, ...], training: Training, layout: Layout) -> Memory:
    """Megatron: weights in 16 bits, gradients in 32, and the optimizer's states divided by the
    data-parallel ranks, those of context parallelism among them: 6 + 12 / d bytes a weight with
    Adam (the table of megatron-core's guide to its distributed optimizer; ZeRO's stage 1).

    Each tensor begins at a multiple of 64 elements, and a buffer ends at one of 128 and of the
    ranks; an embedding that two stages share has a buffer of its own. (So has each virtual stage,
    which is not counted: less than 128 elements for each.) The optimizer of SGD is not divided.
    """
    ranks = layout.data * layout.context
    divided = training.optimizer_values == 2
    element = 2 if training.half else 4
    divisor = math.lcm(ranks, 128)
    own = "embedding" if training.model.tied and layout.pipeline > 1 else ""
    buffers: dict[str, int] = {}
    for part in parts:
        for tensor in part.tensors:
            copies, size = part.copies, tensor.share(layout.tensor)
            if divided:
                size = -(-size // 64) * 64
            name = own if tensor.name == "embed_tokens" else ""
            buffers[name] = buffers.get(name, 0) + copies * size
    buffer = sum(-(-size // divisor) * divisor if divided else size for size in buffers.values())
    # Weights of 32 bits are updated where they are.
    values = (4 if training.half else 0) + 4 * training.optimizer_values
    return Memory(
        weights=element * buffer,
        gradients=4 * buffer,
        optimizer=values * (buffer // ranks if divided else buffer),
    )


# -- activations ----------------------------------------------------------------------------------


def _torch(training: Training, layout: Layout, stage: int) -> tuple[int, int, int]:
    """Bytes kept for the backward pass by Hugging Face's Llama with sdpa; the loss; transient ones.

    Layers below everything that learns keep nothing; with adapters, which stand at the end of
    each layer, that is the first one.

    Not counted: attention masks of padded batches, rotary tables, and workspaces of kernels.
    """
    model, tokens = training.model, layout.micro_batch * training.length
    pure = training.half and (layout.engine == "deepspeed" or layout.fsdp)
    added = [part for part in training.parts if part.kind == "added"]
    below = bool(added) or any(part.learns for part in training.parts if part.kind == "embedding")
    layers = [
        (part.copies, part.learns)
        for part in training.parts
        if part.kind == "layer" and (part.learns or below)
    ]
    if any(tensor.name == "gate" for part in added for tensor in part.tensors):
        layers = [(copies - 1, learns) for copies, learns in layers]
    beside = sum(
        tokens * part.copies * _added_layer(training, part) for part in added if part.copies > 1
    )
    scores = 0 if training.flash else _scores(training, tokens)
    each = [tokens * _layer(training, pure, learns) + scores for _, learns in layers]
    number = sum(copies for copies, _ in layers)
    # The last norm's input, its normalized form if it learns, and then the head's input.
    head = any(part.kind == "head" and part.learns for part in training.parts)
    last = tokens * model.hidden * (4 + (4 + (2 if training.half else 4) if head else 0))
    # In 32 bits: the logits and their log-softmax, or that and its gradient.
    loss = 8 * tokens * model.vocab
    copies = 0 if pure or not training.half else 2 * _matrices(model, number)
    if layout.recompute == "full":
        # At the end of the forward pass autocast's copies are there, and no layer; later one
        # layer, and none of the copies but its own.
        kept = number * tokens * (2 if pure else 4) * model.hidden + last
        one = max(each, default=0) + (beside + copies) // (number + 1)
        return kept, loss, max(copies - loss, one, 0)
    kept = sum(count * size for (count, _), size in zip(layers, each, strict=True))
    return kept + beside + last, loss, copies


def _layer(training: Training, pure: bool, learns: bool) -> int:
    """Bytes that a layer keeps for each token.

    The inputs of both norms, and of each a normalized form if it learns; queries, keys, values and
    the output of attention; the gate, its activation and the other branch. Matrices keep their
    inputs only if they learn: the outputs of the norms, and the product of the branches.

    Autocast has the residual stream and the norms in 32 bits and casts a norm's output anew for
    each matrix that takes it. Where all weights have 16 bits (``pure``), norms still compute in 32,
    and keep what they compute with.
    """
    model, element = training.model, 2 if training.half else 4
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    inside = 2 * queries + 2 * keys + (3 if model.gated else 1) * model.intermediate
    outside = 8 * model.hidden
    if learns:
        inside += model.intermediate
        outside += 2 * (2 if pure else 4) * model.hidden
        outside += (5 if training.half and not pure else 2) * element * model.hidden
    statistics = 4 * (model.heads + 2)
    return outside + element * inside + statistics


def _added_layer(training: Training, part: Part) -> int:
    """Bytes that added matrices keep for each token: their inputs.

    In 32 bits matrices that have the same input keep it once.
    """
    element = 2 if training.half else 4
    shapes = {tensor.name: tensor.shape for tensor in part.tensors}
    if "gate" in shapes:  # an adapter: two of its matrices take the norm's output
        size, hidden = shapes["gate"]
        return element * ((2 if training.half else 1) * hidden + 4 * size)
    inputs: dict[str, int] = {}
    ranks = 0
    for name, (rank, width) in shapes.items():
        target, _, matrix = name.partition(".")
        if matrix == "lora_A":
            ranks += rank
            source = _SOURCES.get(target, target)
            if source != "attention" or training.half:
                inputs[target if training.half else source] = width
    return element * (ranks + sum(inputs.values()))


#: Matrices that take the same tensor; attention's output is kept in any case.
_SOURCES = {
    "q_proj": "first norm",
    "k_proj": "first norm",
    "v_proj": "first norm",
    "o_proj": "attention",
    "gate_proj": "second norm",
    "up_proj": "second norm",
}


def _matrices(model: Model, layers: int) -> int:
    """Elements of the matrices that are multiplied with: of some layers, and of the head."""
    layer = sum(tensor.numel for tensor in model.layer if len(tensor.shape) == 2)
    return layers * layer + model.vocab * model.hidden


def _scores(training: Training, tokens: int) -> int:
    """Bytes of attention's scores of one layer where they are kept: the softmax's output, and with
    dropout a mask and the result (5as²b of Korthikanti et al. 2022, 2as²b without dropout).
    """
    element = 2 if training.half else 4
    each = 2 * element + 1 if training.dropout else element
    return each * training.model.heads * training.length * tokens


def _megatron(training: Training, layout: Layout, stage: int) -> tuple[int, int, int]:
    """Bytes kept for the backward passes of a stage; the loss; transient ones.

    Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022),
    section 4, with GQA and gated feed-forward layers counted in the same way: for each token what
    lies between the tensor-parallel matrices (inputs and outputs of norms, masks of dropout) is
    on every rank unless there is sequence parallelism, and what lies inside of them is divided.
    For GPT with dropout that is s b h (10 + 24/t + 5 a s / (h t)).

    Stages keep several micro-batches: the first as many as there are stages, with v virtual
    stages (1 + (p-1)/(p v)) times that (section 4.2.3; the number of warm-up passes of Megatron's
    schedule). Outputs that were sent on are deallocated (appendix B).
    """
    model, tensor = training.model, layout.tensor
    element = 2 if training.half else 4
    tokens = -(-layout.micro_batch * training.length // layout.context)
    between = tensor if layout.sequence_parallel else 1
    queries, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    outside = 4 * model.hidden * element + (2 * model.hidden if training.dropout else 0)
    # The fused gate keeps its two inputs, and the product is the input of the next matrix.
    inner = 2 * queries + 2 * keys + (3 if model.gated else 2) * model.intermediate
    inside = inner * element
    each = tokens * outside // between + tokens * inside // tensor
    if training.flash:
        each += 4 * tokens * model.heads // tensor
    elif layout.recompute == "none":
        each += _scores(training, tokens) // tensor
    inputs = tokens * model.hidden * element // between
    one = inputs if layout.recompute == "full" else each
    layers = model.layers // (layout.pipeline * layout.virtual)
    kept = in_flight(layout, stage) * layers * one
    if training.dropout and stage == 0:
        kept += tokens * model.hidden * min(layout.pipeline, layout.passes) // between
    loss = 0
    if stage == layout.pipeline - 1:
        # The last norm, the head's input; logits, and the same in 32 bits, which the loss changes
        # in place.
        kept += 2 * inputs
        loss = (element + 4) * tokens * model.vocab // tensor
    return kept, loss, each if layout.recompute == "full" else 0


def in_flight(layout: Layout, stage: int) -> int:
    """Forward passes, of one virtual stage each, whose backward pass is still to come.

    At most: in the 1F1B schedule and the interleaved one (Narayanan et al. 2021, section 2.2).
    """
    after = layout.pipeline - stage - 1
    if layout.virtual == 1:
        return min(layout.passes, after + 1)
    warmup = 2 * after + (layout.virtual - 1) * layout.pipeline
    return min(layout.passes * layout.virtual, warmup + 1)
