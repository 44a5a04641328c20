"""Stands in for SGLang's compiled kernels, which are built for GPUs; for tests alone.

A dense model on CPUs calls one of them. The others can be imported, and refuse to be called.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import torch

__version__ = "0.4.10"
__path__: list[str] = []
LIBRARY = torch.library.Library("sgl_kernel", "DEF")  # torch.ops.sgl_kernel is looked at


def assign_req_to_token_pool_cpu(
    requests: torch.Tensor,
    pool: torch.Tensor,
    starts: torch.Tensor,
    ends: torch.Tensor,
    places: torch.Tensor,
    pool_length: int,
) -> None:
    """Write where the tokens of each request lie into the row of the pool that it has."""
    used = 0
    for request, start, end in zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True):
        pool[request, start:end] = places[used : used + end - start].to(pool.dtype)
        used += end - start


class Missing:
    """A kernel that is not there, or a class of several."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, *_: Any, **__: Any) -> Any:
        raise NotImplementedError(f"{self.name} is not there on CPUs")

    def __getattr__(self, name: str) -> Any:
        return missing(name, self.name)


def missing(name: str, of: str = __name__) -> Any:
    """What an import of ``name`` gets."""
    if name.startswith("__"):
        raise AttributeError(name)
    return Missing(f"{of}.{name}")


__getattr__ = missing


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any module below this one is there, and empty."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.startswith(f"{__name__}."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = missing  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(Submodules())
