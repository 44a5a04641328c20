"""Python reads this first: torchvision's build for GPUs can be imported beside torch's for CPUs.

Its Python side describes two operators that its compiled side, which cannot be loaded, would have
defined.
"""

from __future__ import annotations

import importlib.abc
import sys
from typing import Any


class DefineOperators(importlib.abc.MetaPathFinder):
    """Defines them when torchvision is asked for; others find it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            from torch.library import Library

            # Kept, since its definitions go with it.
            self.library = sys.torchvision_library = Library("torchvision", "DEF")  # type: ignore[attr-defined]
            for operator in ("nms", "qnms"):
                self.library.define(f"{operator}(Tensor dets, Tensor scores, float t) -> Tensor")


sys.meta_path.insert(0, DefineOperators())
