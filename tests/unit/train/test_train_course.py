from __future__ import annotations

import pytest
import torch

from hpcml.train.config import TrainingError
from hpcml.train.course import refuse_broken_weights
from hpcml.train.group import Group


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
def test_parts_of_weights_that_are_no_numbers_are_refused(broken: float) -> None:
    """Shared weights are looked at as plain tensors, which don't say that they learn."""
    part = torch.nn.Parameter(torch.ones(3)).detach()
    group = Group(0, 1)
    refuse_broken_weights([("a", part)], 7, group)
    part[1] = broken
    with pytest.raises(TrainingError, match="a is no longer finite after step 7"):
        refuse_broken_weights([("b", torch.ones(2)), ("a", part)], 7, group)
