"""What the makers say of their GPUs, for sites that only name the kind."""

from __future__ import annotations

import re
from dataclasses import dataclass

_G = 1024**3


@dataclass(frozen=True)
class Gpu:
    """A kind of GPU.

    Attributes:
        name: as it is shown.
        tflops: dense peak of bfloat16 matrix products, in 10^12 floating-point operations per
            second; that is without the makers' factor of 2 for sparse matrices.
        memory: bytes, or None where the kind is sold with several sizes.
    """

    name: str
    tflops: float
    memory: int | None


# From the makers' data sheets, where the products that Slurm's names don't tell apart (PCIe, SXM)
# count as the ones that clusters mostly have: NVIDIA A100 (2021), A30, A10, A40 (2021), L4, L40S
# (2023), H100 (2023: 989 is SXM), H200 (2024), HGX B200 (2025: 2,250 of each GPU), RTX A6000,
# RTX 3090 and 4090 (GA102 and Ada white papers, with 32-bit accumulation); AMD MI210, MI250X (both
# halves: Slurm sees each as a GPU, so half of 383), MI300X (2023).
_KNOWN = {
    "a100": Gpu("A100", 312, None),
    "a800": Gpu("A800", 312, None),
    "a30": Gpu("A30", 165, 24 * _G),
    "a10": Gpu("A10", 125, 24 * _G),
    "a40": Gpu("A40", 149.7, 48 * _G),
    "a6000": Gpu("RTX A6000", 154.8, 48 * _G),
    "l4": Gpu("L4", 121, 24 * _G),
    "l40s": Gpu("L40S", 362, 48 * _G),
    "h100": Gpu("H100", 989, 80 * _G),
    "h800": Gpu("H800", 989, 80 * _G),
    "h200": Gpu("H200", 989, 141 * _G),
    "b200": Gpu("B200", 2250, 180 * _G),
    "3090": Gpu("RTX 3090", 71, 24 * _G),
    "4090": Gpu("RTX 4090", 165.2, 24 * _G),
    "mi210": Gpu("MI210", 181, 64 * _G),
    "mi250x": Gpu("MI250X", 191.5, 64 * _G),
    "mi300x": Gpu("MI300X", 1307, 192 * _G),
}

_SIZE = re.compile(r"(\d+)gb?")


def known(gpu_type: str | None) -> Gpu | None:
    """What is known of a kind of GPU by the name that Slurm has for it.

    The name may have more in it, as in ``nvidia_a100-sxm4-40gb``, whose size counts.
    """
    words = re.split(r"[^a-z0-9]+", (gpu_type or "").lower())
    words += [word.removeprefix("rtx") for word in words]
    found = next((_KNOWN[word] for word in words if word in _KNOWN), None)
    if found is None:
        return None
    size = next((match for word in words if (match := _SIZE.fullmatch(word))), None)
    return Gpu(found.name, found.tflops, int(size[1]) * _G if size else found.memory)
