"""Print what SGLang needs where there is no GPU, a requirement a line; run by its Python.

Its wheel demands all that it could use on GPUs, 11 GB. That is left out, and torch, which is there.
"""

from __future__ import annotations

import importlib.metadata
import re

LEFT_OUT = re.compile(
    # compiled for GPUs
    "cuda-python|flash-attn|flashinfer|humming-kernels|kernels|nvidia-cutlass|nvidia-mathdx|nvshmem|"
    "quack-kernels|sgl-|sglang-kernel|tilelang|torch"
    # for other machines, or not imported by the engine
    "|.*(sys_platform|extra) [!=]=|blobfile|build|modelscope|py-spy|smg-grpc|timm"
)

for requirement in importlib.metadata.requires("sglang") or []:
    if not LEFT_OUT.match(requirement):
        print(requirement)
