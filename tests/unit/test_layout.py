from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.layout import Layout, Shape

SHAPE = Shape(layers=4, heads=4, key_value_heads=2, intermediate=48, length=16, batch=8)


def mistakes(layout: Layout, **shape: Any) -> dict[str, str]:
    return dict(layout.mistakes(Shape(**{**vars(SHAPE), **shape})))


@pytest.mark.parametrize(
    ("layout", "shape", "name", "part"),
    [
        (Layout(tensor=3), {}, "tensor_parallel_size", "3 processes can't share"),
        (Layout(tensor=4), {}, "tensor_parallel_size", "num_key_value_heads 2"),
        (Layout(tensor=2), {"intermediate": 45}, "tensor_parallel_size", "intermediate_size 45"),
        (Layout(pipeline=3), {}, "pipeline_parallel_size", "3 stages can't share 4 layers"),
        (Layout(virtual=2), {}, "virtual_pipeline_stages", "pipeline_parallel_size 2 or more"),
        (Layout(pipeline=2, virtual=4), {}, "virtual_pipeline_stages", "2 stages of 4 parts"),
        (
            Layout(pipeline=2, virtual=2),
            {"passes": 1},
            "virtual_pipeline_stages",
            "1 forward passes",
        ),
        (Layout(sequence=True), {}, "sequence_parallel", "tensor_parallel_size 2 or more"),
        (Layout(tensor=2, sequence=True), {"length": 15}, "sequence_parallel", "max_length 15"),
        (Layout(context=2), {"length": 18}, "context_parallel_size", "max_length 18"),
        (Layout(data=3), {}, "global_batch_size", "8 is not a multiple of data-parallel size 3"),
        (Layout(data=4), {"micro_batch": 4}, "global_batch_size", "per_device_train_batch_size 4"),
        (Layout(data=4), {"passes": 4}, "global_batch_size", "gradient_accumulation_steps 4"),
    ],
)
def test_what_can_not_be_shared_is_told(
    layout: Layout, shape: dict[str, Any], name: str, part: str
) -> None:
    assert part in mistakes(layout, **shape)[name]


@pytest.mark.parametrize(
    ("layout", "shape", "passes"),
    [
        (Layout(), {}, 1),
        (Layout(pipeline=2), {}, 2),
        (Layout(pipeline=4, data=4), {}, 2),
        (Layout(pipeline=4, data=8), {}, 1),
        (Layout(data=2), {"micro_batch": 1}, 4),
        (Layout(pipeline=2), {"passes": 8}, 8),
    ],
)
def test_a_pipeline_is_filled_as_far_as_the_batch_goes(
    layout: Layout, shape: dict[str, Any], passes: int
) -> None:
    assert not mistakes(layout, **shape)
    assert layout.passes(Shape(**{**vars(SHAPE), **shape})) == passes


@pytest.mark.parametrize(
    ("layout", "processes", "nearest"),
    [
        (Layout(tensor=4), 4, Layout(tensor=2, data=2)),
        (Layout(tensor=3), 6, None),
        (Layout(tensor=3), 4, Layout(tensor=2, data=2)),
        (Layout(pipeline=3, tensor=2), 8, Layout(pipeline=4, tensor=2)),
        (Layout(pipeline=2, virtual=3), 2, Layout(pipeline=2, virtual=2)),
        (Layout(tensor=2, sequence=True), 2, Layout(tensor=2, sequence=True)),
    ],
)
def test_the_nearest_layout(layout: Layout, processes: int, nearest: Layout | None) -> None:
    assert layout.nearest(SHAPE, processes) == nearest


counts = st.integers(1, 8)


@given(counts, counts, counts, st.booleans(), st.integers(1, 32), st.integers(1, 24))
def test_the_nearest_layout_always_fits(
    tensor: int, pipeline: int, virtual: int, sequence: bool, processes: int, batch: int
) -> None:
    wanted = Layout(tensor=tensor, pipeline=pipeline, virtual=virtual, sequence=sequence)
    shape = Shape(**{**vars(SHAPE), "batch": batch, "layers": 24, "heads": 24})
    found = wanted.nearest(shape, processes)
    if found is not None:
        assert found.processes == processes
        assert not list(found.mistakes(shape))
        assert str(found.data) in str(found)
