"""What to train: the payload of a cell as typed values."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any


class TrainingError(Exception):
    """The training can't start or go on; the message, one line, says why and what to do."""


_DESCRIBES_NEW_MODEL = (
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "intermediate_size", "hidden_act", "tie_word_embeddings", "init_method", "init_std",
    "init_gain",
)  # fmt: skip


@dataclass(frozen=True)
class TrainingConfig:
    """The hyperparameters, by their canonical names.

    Rates are per step, sizes in tokens or sequences as their names say. None means "not used",
    or "derived" where a comment says from what.
    """

    # length
    num_train_epochs: float = 1.0
    max_steps: int | None = None  # instead of num_train_epochs
    global_batch_size: int = 8
    per_device_train_batch_size: int | None = None  # from the global batch
    gradient_accumulation_steps: int | None = None  # from the global batch
    # optimizer
    optim: str = "adamw"
    learning_rate: float = 1e-3
    momentum: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    weight_decay: float = 0.0
    layerwise_lr_decay: float = 1.0
    max_grad_norm: float = 1.0
    grad_norm_type: float = 2.0
    clip_grad_value: float | None = None
    # schedule
    lr_scheduler_type: str = "linear"
    warmup_steps: int = 0
    warmup_ratio: float | None = None  # instead of warmup_steps
    lr_step_size: int = 100
    lr_gamma: float | None = None  # 0.1 for step, 0.99 for exponential
    lr_end: float = 0.0
    lr_power: float = 1.0
    lr_num_cycles: float | None = None  # 0.5 for cosine, 1 for cosine_with_restarts
    lr_cyclic_mode: str = "triangular"
    lr_base: float = 0.0
    lr_step_size_up: int = 100
    lr_pct_start: float = 0.3
    lr_div_factor: float = 25.0
    lr_final_div_factor: float = 1e4
    lr_patience: int = 10
    lr_factor: float = 0.1
    lr_threshold: float = 1e-4
    # loss
    loss_function: str = "cross_entropy"
    focal_gamma: float = 2.0
    z_loss_weight: float = 1e-4
    label_smoothing_factor: float = 0.0
    # course
    eval_strategy: str = "steps"
    eval_steps: int = 100
    save_steps: int | None = None  # by the clock, see TrainingJob.interval
    logging_steps: int = 10
    load_best_model_at_end: bool = False
    early_stopping_patience: int | None = None
    early_stopping_threshold: float = 0.0
    seed: int = 0
    # data
    vocab_size: int = 2000
    max_length: int = 128
    add_eos_token: bool = True
    group_by_length: bool = False
    # model
    hidden_size: int = 128
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    num_key_value_heads: int | None = None  # as many as num_attention_heads
    intermediate_size: int | None = None  # 8/3 of hidden_size, in steps of 64
    hidden_act: str = "silu"
    tie_word_embeddings: bool = True
    dropout: float = 0.0
    init_method: str = "normal"
    init_std: float = 0.02
    init_gain: float = 1.0
    # fine-tuning
    fine_tuning_method: str = "full"
    num_frozen_layers: int | None = None
    frozen_layers: list[int] | None = None  # instead of num_frozen_layers
    num_top_layers: int = 0
    r: int = 8
    lora_alpha: float = 16.0
    target_modules: list[str] = field(default_factory=lambda: ["q_proj", "v_proj"])
    lora_dropout: float = 0.0
    bias: str = "none"
    task_type: str = "CAUSAL_LM"
    adapter_size: int = 32
    num_virtual_tokens: int = 16
    # hardware
    fp16: bool = False
    bf16: bool = False
    ddp_backend: str | None = None  # nccl with GPUs, gloo without
    gradient_checkpointing: bool = False
    fsdp: bool = False
    zero_stage: int = 2
    offload: str = "none"
    data_parallel_size: int | None = None  # from the number of processes
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    context_parallel_size: int = 1
    sequence_parallel: bool = False
    virtual_pipeline_stages: int = 1

    @classmethod
    def from_parameters(cls, parameters: Mapping[str, Any]) -> TrainingConfig:
        """The configuration of a cell's resolved parameters; null stands for the default.

        Raises:
            TrainingError: a parameter that no engine knows, so that it would be ignored.
        """
        known = {row.name for row in fields(cls)}
        unknown = sorted(name for name, value in parameters.items() if name not in known)
        if unknown:
            raise TrainingError(f"no engine has a parameter {', '.join(unknown)}")
        return cls(**{name: value for name, value in parameters.items() if value is not None})

    def layout(self, world_size: int) -> tuple[int, int]:
        """How a step is divided: sequences of one forward pass, and forward passes of one rank.

        Raises:
            TrainingError: the three batch sizes and the number of processes contradict each other.
        """
        if self.data_parallel_size not in (None, world_size):
            raise TrainingError(
                f"data_parallel_size is {self.data_parallel_size}, but {world_size} processes run"
            )
        per_rank, rest = divmod(self.global_batch_size, world_size)
        size = self.per_device_train_batch_size or per_rank // (
            self.gradient_accumulation_steps or 1
        )
        passes = self.gradient_accumulation_steps or (per_rank // size if size else 0)
        if rest or size * passes != per_rank or not size:
            raise TrainingError(
                f"global_batch_size {self.global_batch_size} is not {world_size} processes of "
                f"{self.per_device_train_batch_size or size} sequences in "
                f"{self.gradient_accumulation_steps or passes} forward passes"
            )
        return size, passes


@dataclass(frozen=True)
class TrainingJob:
    """One cell: what to train, on what, and where to leave it.

    Attributes:
        cell_dir: the cell's folder.
        cell_id: its id.
        engine: what trains.
        config: the hyperparameters.
        given: names of the parameters that the recipe gives, as opposed to defaults.
        model: folder of the model to go on from, or None for a new one.
        source, files: the corpus.
        tokenizer: folder of a tokenizer, or None for the model's own or a trained one.
        eval_fraction: part of the documents that is held out.
        packing: whether documents are joined into sequences without gaps.
        keep: how many checkpoints remain.
        interval: seconds between two checkpoints, or None for the ones that lose the least. With
            ``save_steps`` it does not count.
        mtbf: mean seconds between two failures of the job.
        lead: seconds between the signal and the end of the job, or None if nobody knows.
        deepspeed: what is to be put over DeepSpeed's configuration.
        metric, mode: the objective; ``mode`` is ``min`` or ``max``.
        data_root: where tokenized data lies.
        metrics: the file for metrics lines, or None.
        until: the step where it is to save and leave, as a rung of a halving; None is the end.
    """

    cell_dir: Path
    config: TrainingConfig
    data_root: Path
    cell_id: str = "cell"
    engine: str = "torch"
    given: frozenset[str] = frozenset()
    model: Path | None = None
    source: str | None = None
    files: tuple[str, ...] = ()
    tokenizer: Path | None = None
    eval_fraction: float = 0.05
    packing: bool = True
    keep: int = 2
    interval: float | None = None
    mtbf: float = math.inf
    lead: float | None = None
    deepspeed: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "eval_loss"
    mode: str = "min"
    metrics: Path | None = None
    until: int | None = None

    @property
    def checkpoints(self) -> Path:
        """The folder of the cell's checkpoints."""
        return self.cell_dir / "checkpoints"

    @property
    def events(self) -> Path:
        """The file of the cell's events."""
        return self.cell_dir / "events.jsonl"

    def check(self) -> None:
        """Refuse values that contradict each other, whatever trains.

        Raises:
            TrainingError: says which.
        """
        config = self.config
        if self.model is not None:
            ignored = sorted(self.given.intersection(_DESCRIBES_NEW_MODEL))
            if ignored:
                raise TrainingError(f"{', '.join(ignored)} can't be set: {self.model} decides")
        if config.group_by_length and self.packing:
            raise TrainingError(
                "group_by_length needs data.packing false: packed sequences are equal"
            )
        if config.fp16 and config.bf16:
            raise TrainingError("fp16 and bf16 exclude each other")
        if self.metric != "eval_loss" or not self.eval_fraction:
            needs = [
                name
                for name, used in (
                    ("load_best_model_at_end", config.load_best_model_at_end),
                    ("early_stopping_patience", config.early_stopping_patience is not None),
                    ("reduce_on_plateau", config.lr_scheduler_type == "reduce_on_plateau"),
                )
                if used
            ]
            if needs:
                raise TrainingError(
                    f"{needs[0]} needs the objective eval_loss and a held-out part of the data"
                )

    @classmethod
    def load(cls, cell_dir: Path, environment: Mapping[str, str]) -> TrainingJob:
        """Read ``cell.json``.

        Args:
            cell_dir: the cell's folder.
            environment: with ``HPCML_DATA_ROOT`` and ``HPCML_METRICS``, where they are needed.

        Raises:
            TrainingError: the file or a value is missing or wrong.
        """
        path = cell_dir / "cell.json"
        try:
            cell = json.loads(path.read_text())
            payload = cell["payload"]
            data = payload["data"]
            objective = payload.get("objective") or {}
            checkpoint = payload.get("checkpoint") or {}
            interval = checkpoint.get("interval", "auto")
            nodes = int(environment.get("WORLD_SIZE", "1")) // int(
                environment.get("LOCAL_WORLD_SIZE", "1")
            )
            lead = environment.get("HPCML_SIGNAL_LEAD")
            return cls(
                cell_dir=cell_dir,
                cell_id=cell["id"],
                engine=payload["engine"],
                config=TrainingConfig.from_parameters(payload["parameters"]),
                given=frozenset(cell["params"]),
                model=_model(payload.get("model")),
                source=data.get("source"),
                files=tuple(data.get("files") or ()),
                tokenizer=_path(data.get("tokenizer")),
                eval_fraction=data.get("eval_fraction", 0.05),
                packing=data.get("packing", True),
                keep=checkpoint.get("keep", 2),
                interval=None if interval == "auto" else float(interval),
                mtbf=float(environment.get("HPCML_NODE_MTBF", "inf")) / max(nodes, 1),
                lead=float(lead) if lead else None,
                deepspeed=payload.get("deepspeed") or {},
                metric=objective.get("metric", "eval_loss"),
                mode=objective.get("mode", "min"),
                data_root=Path(environment.get("HPCML_DATA_ROOT") or cell_dir / "data"),
                metrics=_path(environment.get("HPCML_METRICS")),
                until=int(environment["HPCML_STEPS"]) if "HPCML_STEPS" in environment else None,
            )
        except FileNotFoundError as error:
            raise TrainingError(f"{path} is missing: the worker writes it") from error
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise TrainingError(f"{path} is no cell of a training: {error!r}") from error


def _model(value: str | None) -> Path | None:
    """A model's folder; of a checkpoint of hpcml, the folder of the model in it."""
    path = _path(value)
    if path is not None and (path / "model" / "config.json").is_file():
        return path / "model"
    return path


def _path(value: str | None) -> Path | None:
    return Path(value) if value else None
