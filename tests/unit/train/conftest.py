from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="the engine torch is not installed")
pytest.importorskip("transformers", reason="the engine torch is not installed")
pytest.importorskip("peft", reason="the engine torch is not installed")


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)
