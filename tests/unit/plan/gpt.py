"""Published trainings of GPT, which is not Llama: biases, LayerNorm, learned positions, dropout."""

from __future__ import annotations

from typing import NamedTuple

from hpcml.plan.training.layout import Layout, Training
from hpcml.plan.training.learning import parts_of
from hpcml.plan.training.model import Model

GIB = 1024**3


class Published(NamedTuple):
    """A row of table 1 of Narayanan et al. 2021, trained on A100 of 80 GB."""

    billions: float
    heads: int
    hidden: int
    layers: int
    tensor: int
    pipeline: int
    gpus: int
    batch: int
    tflops: int  # reached by each GPU
    percent: int  # of its peak of 312
    petaflops: float  # reached by all


TABLE = [
    Published(1.7, 24, 2304, 24, 1, 1, 32, 512, 137, 44, 4.4),
    Published(3.6, 32, 3072, 30, 2, 1, 64, 512, 138, 44, 8.8),
    Published(7.5, 32, 4096, 36, 4, 1, 128, 512, 142, 46, 18.2),
    Published(18.4, 48, 6144, 40, 8, 1, 256, 1024, 135, 43, 34.6),
    Published(39.1, 64, 8192, 48, 8, 2, 512, 1536, 138, 44, 70.8),
    Published(76.1, 80, 10240, 60, 8, 4, 1024, 1792, 140, 45, 143.8),
    Published(145.6, 96, 12288, 80, 8, 8, 1536, 2304, 148, 47, 227.1),
    Published(310.1, 128, 16384, 96, 8, 16, 1920, 2160, 155, 50, 297.4),
    Published(529.6, 128, 20480, 105, 8, 35, 2520, 2520, 163, 52, 410.2),
    Published(1008.0, 160, 25600, 128, 8, 64, 3072, 3072, 163, 52, 502.0),
]
LENGTH, VOCAB = 2048, 51200

_BIASED = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "up_proj", "down_proj"})


def gpt(layers: int, hidden: int, heads: int) -> Model:
    return Model(
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=4 * hidden,
        vocab=VOCAB,
        head_dim=hidden // heads,
        gated=False,
        biased=_BIASED,
        layer_norm=True,
        positions=LENGTH,
    )


def training_of(model: Model, batch: int) -> Training:
    """As in 2021: 16 bits, dropout, attention whose scores are kept."""
    return Training(model, parts_of(model, {}), LENGTH, batch, half=True, dropout=True, flash=False)


def published(row: Published) -> tuple[Training, Layout]:
    """The row's training in its layout, with micro-batches of one sequence."""
    training = training_of(gpt(row.layers, row.hidden, row.heads), row.batch)
    data = row.gpus // (row.tensor * row.pipeline)
    layout = Layout(
        "megatron",
        data=data,
        tensor=row.tensor,
        pipeline=row.pipeline,
        passes=row.batch // data,
        recompute="full",
    )
    return training, layout
