"""Memory by layout: what must hold whatever the model."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from hpcml.plan.training.layout import Layout, Training, layout_of, mistakes
from hpcml.plan.training.learning import parts_of
from hpcml.plan.training.memory import GIB, in_flight, largest, memory, stage_parts
from hpcml.plan.training.model import Model, numel
from hpcml.plan.training.ranking import choices, nearest
from hpcml.recipe.hyperparameters import BY_NAME, HYPERPARAMETERS

POWERS = [1, 2, 4, 8]


@st.composite
def trainings(draw: st.DrawFn) -> Training:
    heads = draw(st.sampled_from([8, 16, 32]))
    head = draw(st.sampled_from([16, 64, 128]))
    model = Model(
        layers=8 * draw(st.integers(1, 8)),
        hidden=heads * head,
        heads=heads,
        kv_heads=draw(st.sampled_from([8, heads])),
        intermediate=64 * draw(st.integers(1, 200)),
        vocab=draw(st.integers(1000, 200_000)),
        head_dim=head,
        tied=draw(st.booleans()),
        gated=draw(st.booleans()),
    )
    return Training(
        model=model,
        parts=parts_of(model, {}),
        length=1024 * draw(st.integers(1, 8)),
        global_batch=64,
        half=draw(st.booleans()),
        dropout=draw(st.booleans()),
        flash=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    pipeline = draw(st.sampled_from(POWERS))
    tensor = draw(st.sampled_from(POWERS))
    return Layout(
        "megatron",
        data=draw(st.sampled_from(POWERS)),
        tensor=tensor,
        pipeline=pipeline,
        context=draw(st.sampled_from([1, 2])),
        sequence_parallel=tensor > 1 and draw(st.booleans()),
        passes=8,
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
    )


@given(trainings(), layouts(), st.sampled_from(["tensor", "pipeline", "data", "context"]))
def test_dividing_more_needs_less(training: Training, layout: Layout, name: str) -> None:
    """The fullest GPU has less, or (where the rest of a division is padding) hardly more."""
    more = replace(layout, **{name: 2 * getattr(layout, name)})
    assume(more.tensor <= 8 and more.pipeline <= 8)
    less, before = largest(training, more), largest(training, layout)
    padding = 16 * 4 * 128 * (len(training.model.layer) + 4) * training.model.layers
    assert less.optimizer <= before.optimizer + padding
    assert less.weights <= before.weights + padding
    if name == "pipeline" and layout.pipeline == 1 and training.model.tied:
        return  # the embedding comes to be there twice
    if name == "pipeline" and training.dropout:
        return  # the first stage keeps the embedding's mask of as many micro-batches as stages
    assert less.total <= before.total * 1.0001 + 3 * padding


@given(trainings(), layouts())
def test_ranks_hold_the_model_together(training: Training, layout: Layout) -> None:
    """All stages have each layer once; what is there twice is the embedding of a tied head, and on
    each tensor-parallel rank the norms.
    """
    model = training.model
    held = 0
    for stage in range(layout.pipeline):
        for part in stage_parts(training, layout, stage):
            held += part.copies * sum(tensor.share(layout.tensor) for tensor in part.tensors)
    replicated = model.layers * sum(t.numel for t in model.layer if t.split is None)
    replicated += sum(t.numel for t in model.head if t.split is None)
    rows = -(-model.vocab // layout.tensor) * layout.tensor
    padding = (rows - model.vocab) * model.hidden * (1 if model.tied else 2)
    twice = rows * model.hidden if model.tied and layout.pipeline > 1 else 0
    together = layout.tensor * held
    assert together == model.parameters + (layout.tensor - 1) * replicated + padding + twice


@given(trainings(), st.integers(1, 64), st.booleans())
def test_sharded_states_sum_to_all(training: Training, ranks: int, half: bool) -> None:
    """Rank 0 has at least its part, and never more than a row of each tensor beyond it."""
    training = replace(training, half=half)
    parameters = training.parameters
    rows = sum(p.copies * math.prod(t.shape[1:]) for p in training.parts for t in p.tensors)
    for layout in (
        Layout("torch", data=ranks, fsdp=True),
        Layout("deepspeed", data=ranks, zero_stage=3),
    ):
        needed = memory(training, layout)
        element = 2 if half and layout.engine == "deepspeed" else 4
        assert parameters <= needed.weights / element * ranks <= parameters + rows * ranks
    shares = [
        memory(training, Layout("deepspeed", data=ranks, zero_stage=stage)).states
        for stage in range(4)
    ]
    if ranks > 1 and half:
        padding = 16 * ranks * 200 * training.model.layers
        assert shares == sorted(shares, reverse=True) or max(shares) - min(shares) < padding


@pytest.mark.parametrize("virtual", [1, 2, 4])
@pytest.mark.parametrize("passes", [1, 4, 8, 32])
def test_no_stage_keeps_more_than_there_is(virtual: int, passes: int) -> None:
    layout = Layout("megatron", pipeline=4, virtual=virtual, passes=passes)
    kept = [in_flight(layout, stage) for stage in range(4)]
    assert kept == sorted(kept, reverse=True)
    assert all(1 <= each <= passes * virtual for each in kept)
    assert kept[-1] == 1 + min(passes * virtual - 1, (virtual - 1) * 4)


LLAMA_7B = Model(32, 4096, 32, 32, 11008, 32000, 128, tied=False)


def seven(**changes: Any) -> Training:
    return Training(LLAMA_7B, parts_of(LLAMA_7B, {}), 4096, 512, 1000, half=True, **changes)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout("megatron", data=1, tensor=3), "3 processes can't share num_attention_heads 32"),
        (Layout("megatron", data=1, pipeline=3), "3 stages can't share 32 layers"),
        (Layout("megatron", data=1, tensor=16), "more than the 8 GPUs of a node"),
        (
            Layout("megatron", pipeline=4, virtual=4, micro_batch=256, passes=2),
            "an update has 2 forward passes",
        ),
        (Layout("megatron", data=1, pipeline=2, virtual=32), "2 stages of 32 parts"),
        (Layout("megatron", data=3), "512 is not a multiple of data-parallel size 3"),
        (Layout("torch", data=2, micro_batch=3, passes=85), "512 is not a multiple of"),
        (Layout("megatron", context=3), "max_length 4096 can't be shared so"),
        (Layout("megatron", tensor=8, data=2), "= 16 processes, but resources gives 8"),
    ],
)
def test_impossible_layouts_are_explained(layout: Layout, message: str) -> None:
    world = 8 if "resources gives 8" in message else layout.world
    found = list(mistakes(layout, seven(), world, 8))
    assert any(message in mistake for mistake in found), found


def test_layout_of_parameters() -> None:
    parameters = {
        "global_batch_size": 64,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 8,
        "data_parallel_size": 4,
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "virtual_pipeline_stages": 4,
        "sequence_parallel": True,
        "gradient_checkpointing": True,
    }
    layout = layout_of("megatron", parameters, 16)
    assert layout == Layout(
        "megatron", 4, 2, 2, virtual=4, sequence_parallel=True, micro_batch=2, passes=8,
        recompute="full",
    )  # fmt: skip
    for name, value in layout.settings().items():
        assert parameters.get(name, value) == value
    settings = Layout("deepspeed", data=2, zero_stage=3, offload="all").settings()
    assert settings["zero_stage"] == 3
    assert settings["offload"] == "all"


ENGINES = [
    engine
    for engine in ("torch", "deepspeed", "megatron")
    if any(engine in row.engines for row in HYPERPARAMETERS)
]


@pytest.mark.parametrize("engine", ENGINES)
def test_every_choice_is_possible_and_fits(engine: str) -> None:
    model = replace(LLAMA_7B, layers=8)  # which DDP can hold as well
    training, room = replace(seven(), model=model, parts=parts_of(model, {})), 80 * GIB
    found = choices(training, Layout(engine, data=64), 8, room)
    assert found
    for choice in found:
        assert list(mistakes(choice.layout, training, 64, 8)) == []
        assert choice.memory.total <= room
        assert choice.memory == largest(training, choice.layout)
        assert all(engine in BY_NAME[name].engines for name in choice.layout.settings())
        # What its settings say is the layout again.
        layout, batch = choice.layout, {"global_batch_size": 512, "data_parallel_size": None}
        again = layout_of(engine, {**batch, **layout.settings()}, 64)
        assert again == layout
    kept = [choice.work for choice in found if choice.layout.offload == "none"]
    assert kept == sorted(kept)


def test_the_nearest_is_near() -> None:
    training = seven()
    given_ = Layout("megatron", data=8, tensor=1, pipeline=8, micro_batch=16, passes=4)
    found = choices(training, given_, 8, 80 * GIB)
    near = nearest(given_, found)
    assert near is not None
    assert near.layout.tensor == 1
    assert near.layout.pipeline == 8
    assert near.layout.micro_batch < 16
    assert nearest(given_, []) is None
    assert choices(training, given_, 8, GIB) == []


def test_offloading_moves_states_to_the_host() -> None:
    training = seven()
    plain = memory(training, Layout("deepspeed", data=8, zero_stage=3))
    half = memory(training, Layout("deepspeed", data=8, zero_stage=3, offload="optimizer"))
    whole = memory(training, Layout("deepspeed", data=8, zero_stage=3, offload="all"))
    assert half.host == plain.optimizer + plain.gradients
    assert half.weights == plain.weights
    assert whole.states == 0
    assert whole.host == plain.states


@pytest.mark.parametrize(
    ("method", "parameters", "learning"),
    [
        ("full", {}, LLAMA_7B.parameters),
        ("freeze", {"num_frozen_layers": 32}, numel(LLAMA_7B.head)),
        ("freeze", {"num_frozen_layers": None, "frozen_layers": [0, 5]},
         LLAMA_7B.parameters - 2 * numel(LLAMA_7B.layer)),
        ("top", {"num_top_layers": 2}, numel(LLAMA_7B.head) + 2 * numel(LLAMA_7B.layer)),
        ("lora", {"r": 8, "target_modules": ["q_proj", "v_proj"]}, 32 * 2 * 2 * 8 * 4096),
        ("adapter", {"adapter_size": 16}, 32 * 3 * 16 * 4096),
        ("prompt_tuning", {"num_virtual_tokens": 20}, 20 * 4096),
    ],
)  # fmt: skip
def test_what_learns(method: str, parameters: dict[str, Any], learning: int) -> None:
    parts = parts_of(LLAMA_7B, {"fine_tuning_method": method, **parameters})
    training = replace(seven(), parts=parts)
    assert training.learning == learning
    needed = memory(training, Layout("torch"))
    assert needed.gradients == 4 * learning
    assert needed.optimizer == 8 * learning
