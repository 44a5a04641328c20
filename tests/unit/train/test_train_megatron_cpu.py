"""What the CUDA spellings of megatron-core mean on a CPU, and that it is over afterwards."""

from __future__ import annotations

import pytest
import torch
from torch.utils._device import _device_constructors

pytest.importorskip("megatron.core", reason="the engine megatron is not installed")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


def test_cuda_means_the_cpu_until_the_block_ends() -> None:
    from hpcml.train.megatron.cpu import on_cpu

    before = torch.empty, torch.Tensor.type, torch.cuda.current_device
    with on_cpu():
        assert torch.empty(2, device="cuda").device.type == "cpu"
        assert torch.empty(2).cuda().device.type == "cpu"
        assert torch.empty(2).type() == "torch.cuda.FloatTensor"
    assert (torch.empty, torch.Tensor.type, torch.cuda.current_device) == before
    assert "cuda" not in vars(torch.Tensor)


def test_other_devices_can_be_chosen_afterwards() -> None:
    from hpcml.train.megatron.cpu import on_cpu

    _device_constructors.cache_clear()
    with on_cpu(), torch.device("meta"):
        torch.empty(2)
    with torch.device("meta"):
        made = [torch.empty(2), torch.zeros(2), torch.ones(2), torch.tensor([1.0])]
    assert {tensor.device.type for tensor in made} == {"meta"}
