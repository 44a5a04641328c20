"""What is estimated agrees with what was published."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hpcml.plan.training.compute import Speed, step_flops, step_seconds
from hpcml.plan.training.layout import Layout, Training, mistakes
from hpcml.plan.training.learning import parts_of
from hpcml.plan.training.memory import largest, memory
from hpcml.plan.training.model import Model
from hpcml.plan.training.ranking import choices
from tests.unit.plan.gpt import GIB, LENGTH, TABLE, VOCAB, Published, gpt, published, training_of

ROWS = pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row.billions}B")


@ROWS
def test_narayanan_parameters(row: Published) -> None:
    """P = 12 l h² (1 + 13/(12h) + (V + s)/(12 l h)), but for the last norm's 2 h."""
    training, _ = published(row)
    h, layers = row.hidden, row.layers
    formula = 12 * layers * h**2 + 13 * layers * h + (VOCAB + LENGTH) * h
    assert training.parameters == formula + 2 * h
    assert training.parameters / 1e9 == pytest.approx(row.billions, rel=0.03)
    assert row.gpus * row.tflops / 1e3 == pytest.approx(row.petaflops, rel=0.01)


@ROWS
def test_narayanan_operations(row: Published) -> None:
    """F = 96 B s l h² (1 + s/(6h) + V/(16 l h)), and 72 without recomputation."""
    training, _ = published(row)
    h, layers = row.hidden, row.layers
    work = row.batch * LENGTH * layers * h**2
    full = 96 * work * (1 + LENGTH / (6 * h) + VOCAB / (16 * layers * h))
    plain = 72 * work * (1 + LENGTH / (6 * h) + VOCAB / (12 * layers * h))
    assert step_flops(training, "full") == pytest.approx(full, rel=1e-12)
    assert step_flops(training) == pytest.approx(plain, rel=1e-12)


@ROWS
def test_narayanan_layouts_fit(row: Published) -> None:
    """On 80 GB, also without the distributed optimizer, which there was not yet."""
    training, layout = published(row)
    assert list(mistakes(layout, training, row.gpus, 8)) == []
    needed = largest(training, layout)
    assert needed.total < 80 * GIB
    replicated = 12 * needed.weights // 2
    assert needed.total - needed.optimizer + replicated < 80 * GIB


@ROWS
def test_the_ranking_is_at_least_as_good_as_narayanan(row: Published) -> None:
    training, layout = published(row)
    best = choices(training, layout, 8, 80 * GIB)[0]
    assert best.layout.world == row.gpus
    assert best.memory.total <= 80 * GIB
    speed = Speed(312, 0.5)
    assert step_seconds(training, best.layout, speed) <= step_seconds(training, layout, speed)


@ROWS
def test_narayanan_times(row: Published) -> None:
    """Given what each GPU reached, a step takes what the table's numbers say."""
    training, layout = published(row)
    seconds = step_seconds(training, layout, Speed(312, row.tflops / 312))
    ideal = step_flops(training, "full") / (row.petaflops * 1e15)
    # The table's rate has the bubble in it.
    assert seconds / (1 + layout.bubble) == pytest.approx(ideal, rel=0.01)


def test_gpt3_needs_its_pipeline() -> None:
    """175 B on 80 GB: 8-way tensor parallelism alone is not enough; with 16 stages it is."""
    training = training_of(gpt(96, 12288, 96), 1536)
    assert training.parameters / 1e9 == pytest.approx(174.6, abs=0.5)
    deep = Layout("megatron", data=8, tensor=8, pipeline=16, passes=192, recompute="full")
    flat = Layout("megatron", data=128, tensor=8, passes=12, recompute="full")
    assert deep.world == flat.world == 1024
    assert largest(training, deep).total < 80 * GIB
    assert largest(training, flat).states > 80 * GIB


@pytest.mark.parametrize("tensor", [1, 2, 8])
@pytest.mark.parametrize("sequence", [False, True])
def test_korthikanti_activations_of_a_layer(tensor: int, sequence: bool) -> None:
    """s b h (10 + 24/t + 5as/(ht)), all of it divided with sequence parallelism, without 5as/(ht)
    with selective recomputation, and 2 s b h with full recomputation.
    """
    model, s, b = gpt(48, 8192, 64), LENGTH, 4
    layout = Layout("megatron", tensor=tensor, micro_batch=b, sequence_parallel=sequence)
    t, h = tensor, model.hidden
    between = 10 / t if sequence else 10
    scores = 5 * model.heads * s / (h * t)
    expected = {
        "none": s * b * h * (between + 24 / t + scores),
        "selective": s * b * h * (between + 24 / t),
        "full": s * b * h * 2 / (t if sequence else 1),
    }
    for recompute, one in expected.items():
        kept = [
            memory(
                training_of(replace(model, layers=layers), b),
                replace(layout, recompute=recompute),  # type: ignore[arg-type]
            ).activations
            for layers in (4, 8)
        ]
        assert kept[1] - kept[0] == 4 * one, recompute


@pytest.mark.parametrize("virtual", [1, 2, 4])
def test_korthikanti_pipeline(virtual: int) -> None:
    """The first stage keeps L layers of activations, whatever the stages, and with an interleaved
    schedule L (1 + (p - 1)/(p v)): section 4.2.3.
    """
    pipeline, layers = 8, 32
    model = gpt(layers, 8192, 64)
    training = replace(training_of(model, 64), dropout=False)
    alone = memory(training, Layout("megatron", passes=64))
    # Without the last norm and the head's input, which the first stage has not.
    whole = alone.activations - 2 * 2 * LENGTH * model.hidden
    layout = Layout("megatron", pipeline=pipeline, virtual=virtual, passes=64)
    factor = 1 if virtual == 1 else 1 + (pipeline - 1) / (pipeline * virtual)
    assert memory(training, layout).activations == pytest.approx(whole * factor, rel=1e-12)
    assert layout.bubble == (pipeline - 1) / (virtual * 64)


def llama(layers: int, hidden: int, heads: int, kv_heads: int, inner: int, vocab: int) -> Model:
    return Model(layers, hidden, heads, kv_heads, inner, vocab, hidden // heads, tied=False)


@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (llama(32, 4096, 32, 32, 11008, 32000), 6_738_415_616),  # Llama 2 7B
        (llama(40, 5120, 40, 40, 13824, 32000), 13_015_864_320),  # Llama 2 13B
        (llama(32, 4096, 32, 8, 14336, 128256), 8_030_261_248),  # Llama 3 8B
        (llama(80, 8192, 64, 8, 28672, 128256), 70_553_706_496),  # Llama 3 70B
    ],
)
def test_parameters_of_published_llamas(model: Model, parameters: int) -> None:
    assert model.parameters == parameters
    counts = model.counts()
    assert counts["total"] == counts["embedding"] + counts["head"] + counts["non_embedding"]


def test_llama3_405b() -> None:
    """15.6 T tokens took 3.8e25 operations (Grattafiori et al. 2024, section 1), attention's scores
    not counted, and 430 TFLOP/s of each H100 are an MFU of 43 % (table 4).
    """
    model = llama(126, 16384, 128, 8, 53248, 128256)
    assert model.parameters / 1e9 == pytest.approx(405.85, abs=0.05)
    training = Training(model, parts_of(model, {}), 8192, 2048, half=True)
    layout = Layout("megatron", data=64, tensor=8, pipeline=16, passes=32)
    scores = 3 * 4 * 8192 * model.heads * model.head_dim * model.layers
    each = step_flops(training) / (8192 * 2048)
    assert (each - scores) * 15.6e12 == pytest.approx(3.8e25, rel=0.02)
    seconds = step_seconds(training, layout, Speed(989, 0.43))
    reached = step_flops(training) / seconds / layout.world * (1 + layout.bubble)
    assert reached / 1e12 == pytest.approx(430, rel=0.02)
