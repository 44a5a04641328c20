"""The parts of the engine megatron, in one process: what megatron-core gets wrong, or refuses."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="the engine megatron is not installed")

from megatron.core import parallel_state, tensor_parallel
from torch.distributed.checkpoint import FileSystemReader, load
from transformers import LlamaConfig

from hpcml.layout import Layout
from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.llama import Llama
from hpcml.train.megatron import checkpoint, cpu, model, optimizer, weights
from hpcml.train.megatron import layout as layouts
from hpcml.train.model import new_model

# No size is a multiple of 128, to which megatron-core fills up what it communicates.
CONFIG = TrainingConfig(
    hidden_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    intermediate_size=20,
    max_length=8,
    learning_rate=0.1,
)
VOCABULARY = 37


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    with cpu.on_cpu():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1)
        yield
        parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


class Made:
    """A model with its optimizer, and checkpoints of both."""

    def __init__(self, config: TrainingConfig = CONFIG, bucket_size: int | None = None) -> None:
        self.shape = Llama.new(config, VOCABULARY, {})
        transformer = model.transformer_config(self.shape, config, Layout())
        parts = model.build(self.shape, transformer, config.max_length, 1)
        weights.assign(parts, weights.new(self.shape, config), self.shape, 0, 1)
        self.parts = model.data_parallel(
            parts,
            transformer,
            optimizer.is_distributed(config),
            overlap=bucket_size is not None,
            bucket_size=bucket_size,
        )
        self.optimizer = optimizer.build_optimizer(self.parts, config)
        self.checkpointer = checkpoint.Checkpointer(self.parts, self.optimizer, config, 0, 1)

    def step(self, seed: int = 0) -> float:
        tokens = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(seed))
        inputs, labels = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        (part,) = self.parts
        part.zero_grad_buffer()
        loss = part(inputs, torch.arange(8).expand(2, -1), None, labels=labels).mean()
        loss.backward()
        part.finish_grad_sync()
        self.optimizer.step()
        return float(loss.detach())

    def save(self, folder: Path) -> Path:
        folder.mkdir()
        self.checkpointer.begin(folder)
        self.checkpointer.finish()
        return folder

    def states(self) -> list[dict[str, Any]]:
        return list(self.optimizer.optimizer.state.values())


def test_a_checkpoint_continues(tmp_path: Path) -> None:
    first = Made()
    for seed in range(3):
        first.step(seed)
    folder = first.save(tmp_path / "saved")
    expected = [first.step(seed) for seed in (3, 4)]
    again = Made()
    again.checkpointer.load(folder, same_layout=True)
    assert [again.step(seed) for seed in (3, 4)] == expected


def test_each_parameter_counts_its_own_steps(tmp_path: Path) -> None:
    made = Made()
    for seed in range(3):
        made.step(seed)
    folder = made.save(tmp_path / "saved")
    for target in (made, Made()):  # with and without a state before
        target.checkpointer.load(folder, same_layout=True)
        steps = [state["step"] for state in target.states()]
        assert [float(step) for step in steps] == [3.0] * len(steps)
        assert len({step.data_ptr() for step in steps}) == len(steps) > 1


@pytest.mark.parametrize("bucket_size", [None, 100, 1000])
def test_the_state_of_each_parameter_is_its_own_in_the_checkpoint(
    tmp_path: Path, bucket_size: int | None
) -> None:
    made = Made(bucket_size=bucket_size)
    made.step()
    (inner,) = made.optimizer.chained_optimizers
    buffers = inner.buffers
    gaps = sum(bucket.grad_data.numel() - bucket.numel_unpadded for bucket in buffers[0].buckets)
    assert (len(buffers[0].buckets) > 1) == (bucket_size is not None)
    assert gaps
    places = [dict(buffer.param_index_map) for buffer in buffers]
    folder = made.save(tmp_path / "saved")
    assert places == [buffer.param_index_map for buffer in buffers]

    name = "optimizer.state.exp_avg.embedding.word_embeddings.weight"
    reader = FileSystemReader(folder)
    size = reader.read_metadata().state_dict_metadata[name].size
    stored = {name: torch.zeros(size)}
    load(stored, storage_reader=reader, no_dist=True)
    embedding = made.parts[0].module.embedding.word_embeddings.weight
    # After one step from zero, the mean of the gradient is a tenth of it, as it was clipped.
    expected = embedding.main_grad / embedding.main_grad.norm()
    assert torch.allclose(stored[name] / stored[name].norm(), expected, atol=1e-6)


def test_saving_leaves_no_process_behind(tmp_path: Path) -> None:
    made = Made()
    made.step()
    made.save(tmp_path / "first")
    made.save(tmp_path / "second")
    assert multiprocessing.active_children() == []


def test_a_writer_that_fails_is_told(tmp_path: Path) -> None:
    from hpcml.train.checkpoint import CheckpointError

    made = Made()
    made.step()
    full = OSError(28, "No space left on device")
    with mock.patch("torch.distributed.checkpoint.filesystem._write_item", side_effect=full):
        target = "megatron.core.dist_checkpointing.strategies.filesystem_async._write_item"
        with (
            mock.patch(target, side_effect=full),
            pytest.raises(CheckpointError, match="no space left"),
        ):
            made.save(tmp_path / "saved")


def test_a_writer_that_is_killed_is_told(tmp_path: Path) -> None:
    from hpcml.train.checkpoint import CheckpointError

    made = Made()
    made.step()
    (tmp_path / "saved").mkdir()
    made.checkpointer.begin(tmp_path / "saved")
    assert made.checkpointer._writing is not None
    made.checkpointer._writing[1].process.kill()
    with pytest.raises(CheckpointError, match="could not be written"):
        made.checkpointer.finish()


@pytest.mark.parametrize("optim", ["adam", "adamw", "sgd"])
def test_matrices_decay_and_norms_do_not(optim: str) -> None:
    made = Made(TrainingConfig(**{**vars(CONFIG), "optim": optim, "weight_decay": 0.3}))
    decays = {
        group["weight_decay"]: sum(map(torch.Tensor.numel, group["params"]))
        for group in made.optimizer.param_groups
    }
    norms = 5 * CONFIG.hidden_size
    total = sum(parameter.numel() for parameter in made.parts[0].parameters())
    assert decays == {0.3: total - norms, 0.0: norms}


def test_parts_of_stages_do_not_communicate_in_batches() -> None:
    shape = Llama.new(CONFIG, VOCABULARY, {})
    plain = model.transformer_config(shape, CONFIG, Layout(pipeline=2))
    assert plain.batch_p2p_comm
    assert not plain.overlap_p2p_comm
    virtual = model.transformer_config(shape, CONFIG, Layout(pipeline=2, virtual=1))
    assert virtual.batch_p2p_comm
    with mock.patch.object(model, "TransformerConfig") as made:
        model.transformer_config(shape, CONFIG, Layout(pipeline=2, virtual=2))
    assert made.call_args.kwargs["batch_p2p_comm"] is False
    assert made.call_args.kwargs["overlap_p2p_comm"] is True


def test_shared_parameters_say_so() -> None:
    """Otherwise the norm of the gradients would miss them on all ranks but the first."""
    (part,) = Made().parts
    shared = {
        name: getattr(parameter, "tensor_model_parallel", False)
        for name, parameter in part.named_parameters()
    }
    assert all(is_shared == (parameter_is_matrix(name)) for name, is_shared in shared.items())


def parameter_is_matrix(name: str) -> bool:
    return "layernorm" not in name


# -- weights --------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kinds", [(4, 4), (4, 2), (4, 1)])
def test_weights_go_to_megatron_and_back(
    tmp_path: Path, tied: bool, kinds: tuple[int, int]
) -> None:
    heads, key_value_heads = kinds
    config = TrainingConfig(
        **{
            **vars(CONFIG),
            "num_attention_heads": heads,
            "num_key_value_heads": key_value_heads,
            "tie_word_embeddings": tied,
        }
    )
    made = Made(config)
    made.step()  # the optimizer has a state, which the checkpoint holds
    expected = new_model(config, VOCABULARY, {}).state_dict()
    weights.assign(made.parts, expected.__getitem__, made.shape, 0, 1)
    (tmp_path / "model").mkdir()
    made.save(tmp_path / "megatron")
    found = dict(weights.of_checkpoint(tmp_path / "model", made.shape))
    if tied:
        del expected["lm_head.weight"]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], weight) for name, weight in expected.items())


def test_heads_are_joined_group_by_group() -> None:
    shape = LlamaConfig(hidden_size=8, num_attention_heads=4, num_key_value_heads=2)
    queries, keys, values = (torch.arange(rows)[:, None] for rows in (8, 4, 4))
    joined = weights.join_heads([queries, keys + 100, values + 200], shape)
    assert joined[:, 0].tolist() == [
        *(0, 1, 2, 3), *(100, 101), *(200, 201), *(4, 5, 6, 7), *(102, 103), *(202, 203),
    ]  # fmt: skip
    again = weights.split_heads(joined, shape)
    assert [part[:, 0].tolist() for part in again] == [
        list(range(8)), [100, 101, 102, 103], [200, 201, 202, 203],
    ]  # fmt: skip


def test_a_model_that_is_no_llama_is_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config

    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match="is a gpt2"):
        weights.of_folder(tmp_path)
    LlamaConfig(attention_bias=True).save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match="without biases"):
        weights.of_folder(tmp_path)
    LlamaConfig().save_pretrained(tmp_path)
    with pytest.raises(TrainingError, match="no weights in files of safetensors"):
        weights.of_folder(tmp_path)
    with pytest.raises(TrainingError, match=r"no config\.json"):
        weights.of_folder(tmp_path / "nothing")


LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def test_positions() -> None:
    assert model.rotary(LlamaConfig()) == {"rotary_base": 10000.0}
    assert model.rotary(LlamaConfig(rope_parameters=LLAMA3)) == {
        "rotary_base": 500000.0, "rope_scaling": True, "rope_scaling_factor": 8.0,
    }  # fmt: skip
    for other in (
        {**LLAMA3, "low_freq_factor": 2.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    ):
        with pytest.raises(TrainingError, match="positions of Llama 2 and 3"):
            model.rotary(LlamaConfig(rope_parameters=other))


def test_the_positions_of_llama_3_are_those_of_transformers() -> None:
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    shape = LlamaConfig(hidden_size=64, num_attention_heads=2, rope_parameters=LLAMA3)
    mine = RotaryEmbedding(32, 1.0, use_cpu_initialization=True, **model.rotary(shape)).inv_freq
    assert torch.allclose(mine, LlamaRotaryEmbedding(shape).inv_freq)


# -- layout and device ----------------------------------------------------------------------------


def test_the_layout_follows_from_the_processes() -> None:
    shape = Llama.new(CONFIG, VOCABULARY, {})
    config = TrainingConfig(**{**vars(CONFIG), "tensor_parallel_size": 2})
    assert layouts.choose(config, shape, 4) == (Layout(tensor=2, data=2), 4, 1)
    config = TrainingConfig(**{**vars(CONFIG), "pipeline_parallel_size": 2})
    assert layouts.choose(config, shape, 2) == (Layout(pipeline=2), 4, 2)


@pytest.mark.parametrize(
    ("parameters", "processes", "says"),
    [
        ({"tensor_parallel_size": 4}, 4, "num_key_value_heads 2; the nearest layout that works: "
         "tensor_parallel_size 2"),
        ({"pipeline_parallel_size": 2}, 3, "no multiple of that; no other layout fits"),
        ({"data_parallel_size": 3}, 2, "data_parallel_size is 3, but 2 processes run"),
        ({"global_batch_size": 9}, 2, "9 is not a multiple of data-parallel size 2"),
    ],
)  # fmt: skip
def test_a_layout_that_does_not_fit_is_refused(
    parameters: dict[str, Any], processes: int, says: str
) -> None:
    config = TrainingConfig(**{**vars(CONFIG), **parameters})
    with pytest.raises(TrainingError, match=says):
        layouts.choose(config, Llama.new(CONFIG, VOCABULARY, {}), processes)


def test_with_a_gpu_nothing_is_adapted() -> None:
    before = torch.zeros
    with (
        mock.patch("torch.cuda.is_available", return_value=True),
        pytest.raises(RuntimeError, match="there is a GPU"),
        cpu.on_cpu(),
    ):
        raise AssertionError("unreachable")
    assert torch.zeros is before


def test_the_device_of_a_gpu_machine_does_not_touch_the_adapter() -> None:
    import sys

    from hpcml.train.megatron import engine

    name = "hpcml.train.megatron.cpu"
    with (
        mock.patch.dict(sys.modules, {name: None}),  # importing it fails
        mock.patch.dict("os.environ", LOCAL_RANK="3"),
        mock.patch("torch.cuda.is_available", return_value=True),
        mock.patch("torch.cuda.set_device") as chosen,
        engine._device(),
    ):
        assert chosen.call_args.args == (3,)
