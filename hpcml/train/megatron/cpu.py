"""megatron-core on CPUs. Nobody imports this where there is a GPU.

megatron-core has no notion of a device: it writes ``device="cuda"``, ``.cuda()`` and
``torch.cuda.current_device()`` outright. While :func:`on_cpu` runs, these spellings mean the CPU.
What is computed, and how, stays megatron-core's own.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.tensor_parallel import random
from torch.utils._device import _device_constructors

CPU = torch.device("cpu")
_type = torch.Tensor.type


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Let the CUDA spellings of megatron-core mean the CPU, until the block ends.

    Raises:
        RuntimeError: there is a GPU.
    """
    if torch.cuda.is_available():
        raise RuntimeError("there is a GPU: megatron-core needs no help")
    # torch remembers the functions that make tensors when it is first asked for them. They must be
    # its own, or `with torch.device(…)` would mean nothing afterwards.
    _device_constructors()
    with contextlib.ExitStack() as stack:
        for owner, name, value in _spellings():
            if name in vars(owner):
                stack.callback(setattr, owner, name, getattr(owner, name))
            else:
                stack.callback(delattr, owner, name)
            setattr(owner, name, value)
        yield


def _spellings() -> Iterator[tuple[Any, str, Callable[..., Any]]]:
    """Where a spelling is looked up, its name, and what it means here."""
    for name in ("tensor", "zeros", "ones", "empty", "empty_like"):
        yield torch, name, _makes_on_cpu(getattr(torch, name))
    yield torch.Tensor, "cuda", lambda tensor, *args, **kwargs: tensor
    yield torch.Tensor, "type", _cuda_type
    yield torch.cuda, "current_device", lambda: CPU  # used as device=…
    yield torch.cuda, "synchronize", lambda device=None: None
    # megatron-core's tracker of CUDA generators then tracks the one of the CPU.
    yield torch.cuda, "manual_seed", torch.manual_seed
    for owner in (torch.cuda, torch.cuda.random):
        yield owner, "get_rng_state", lambda device=None: torch.get_rng_state()
    yield random, "_set_cuda_rng_state", _set_state


def _makes_on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(make)
    def made(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cuda":
            kwargs["device"] = CPU
        return make(*args, **kwargs)

    return made


def _cuda_type(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """megatron-core compares names, such as ``torch.cuda.FloatTensor``; conversions go through."""
    result = _type(tensor, *args, **kwargs)
    return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result


def _set_state(state: torch.Tensor, device: int = -1, graph_safe: bool = False) -> None:
    torch.set_rng_state(state)
