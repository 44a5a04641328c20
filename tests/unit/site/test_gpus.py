"""Kinds of GPU are known by the names that Slurm has for them."""

from __future__ import annotations

import pytest

from hpcml.site.gpus import known
from hpcml.site.schema import NODE_MTBF

GIB = 1024**3


@pytest.mark.parametrize(
    ("name", "tflops", "memory"),
    [
        ("h100", 989, 80),
        ("NVIDIA_H100_80GB_HBM3", 989, 80),
        ("a100", 312, None),
        ("nvidia_a100-sxm4-40gb", 312, 40),
        ("a100-80g", 312, 80),
        ("rtx4090", 165.2, 24),
        ("geforce_rtx_4090", 165.2, 24),
        ("mi300x", 1307, 192),
    ],
)
def test_known(name: str, tflops: float, memory: int | None) -> None:
    gpu = known(name)
    assert gpu is not None
    assert gpu.tflops == tflops
    assert gpu.memory == (memory * GIB if memory else None)


@pytest.mark.parametrize("name", [None, "", "gpu", "h1000", "a1000", "shard", "quadro_8000"])
def test_nothing_is_invented(name: str | None) -> None:
    assert known(name) is None


def test_a_node_fails_as_often_as_those_of_llama_3_did() -> None:
    """419 interruptions in 54 days on 2,048 nodes: one in about three hours."""
    between = NODE_MTBF / 2048
    assert between == pytest.approx(54 * 24 * 3600 / 419, rel=1e-6)
    assert between / 3600 == pytest.approx(3.09, abs=0.01)
