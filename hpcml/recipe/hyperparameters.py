"""The hyperparameter vocabulary: one table of every parameter a training recipe may give.

Names are those of Hugging Face ``TrainingArguments``, peft ``LoraConfig`` and vLLM
``SamplingParams`` where these have one. ``docs/hyperparameters.md`` is made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

Kind = Literal["whole number", "number", "true or false", "text", "choice", "list", "JSON"]

ANY: tuple[Any, ...] = ()
"""In ``only_with``: any value but null."""


@dataclass(frozen=True)
class Hyperparameter:
    """One row of the vocabulary.

    Attributes:
        name: the name it is stored under.
        group: Training, Fine-tuning, Model, Generation or Hardware.
        kind: the type of its value.
        meaning: one line for a person.
        default: what an engine uses when the recipe doesn't say; null is "not used", unless the
            meaning says how it is derived.
        default_by: defaults that depend on the first parameter of ``only_with``, by its value.
        aliases: other names that are accepted and stored under ``name``.
        choices: the allowed values of a choice.
        minimum, maximum: the allowed range, bounds included.
        above, below: the allowed range, bounds excluded.
        unit: what a number counts.
        off: the value that means "not used"; giving it is never a contradiction.
        only_with: the parameters, and their values, without which this one would be ignored.
        new_model: it describes a model to be made, so it can't go with ``train.model``.
        engines: for each engine that uses it, how; the others refuse it.
        engine_choices: the allowed values of a choice with an engine that has not all of them.
    """

    name: str
    group: str
    kind: Kind
    meaning: str
    default: Any = None
    default_by: Mapping[Any, Any] = field(default_factory=dict)
    aliases: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None
    below: float | None = None
    unit: str = ""
    off: Any = None
    only_with: tuple[tuple[str, tuple[Any, ...]], ...] = ()
    new_model: bool = False
    engines: Mapping[str, str] = field(default_factory=dict)
    engine_choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def _torch(how: str) -> dict[str, str]:
    return {"torch": how}


def _trainer(how: str) -> dict[str, str]:
    """Mapping of what the engines that train with the Trainer do alike."""
    return {"torch": how, "deepspeed": how}


def _sampling(
    vllm: str | None = None, sglang: str | None = None, transformers: str | None = None
) -> dict[str, str]:
    """Mapping of a generation parameter: the field of each engine's sampling settings."""
    engines = {}
    if vllm:
        engines["vllm"] = f"`SamplingParams.{vllm}`"
    if sglang:
        engines["sglang"] = f'`sampling_params["{sglang}"]`'
    if transformers:
        engines["transformers"] = f"`GenerationConfig.{transformers}`"
    return engines


_SCHEDULE = "lr_scheduler_type"
_EVALUATES = (("eval_strategy", ("steps", "epoch")),)
_LORA = (("fine_tuning_method", ("lora",)),)
_COSINES = ("cosine", "cosine_with_restarts")
_WARMS_UP = ("constant", "linear", "step", "exponential", "polynomial", *_COSINES)

_TRAINING = (
    Hyperparameter(
        "num_train_epochs", "Training", "number",
        "How many times to go over the training data; a part of an epoch is allowed.",
        default=1.0, aliases=("epoch", "epochs"), above=0, unit="epochs",
        engines=_trainer("length of the training, unless max_steps is given"),
    ),
    Hyperparameter(
        "max_steps", "Training", "whole number",
        "How many times to update the weights. Instead of num_train_epochs.",
        aliases=("max_train_steps",), minimum=1, unit="steps",
        engines=_trainer("length of the training"),
    ),
    Hyperparameter(
        "learning_rate", "Training", "number",
        "The peak learning rate, which the schedule scales.",
        default=1e-3, aliases=("lr",), above=0,
        engines=_trainer("`lr` of the optimizer"),
    ),
    Hyperparameter(
        "global_batch_size", "Training", "whole number",
        "Sequences for one update of the weights, over all devices: per_device_train_batch_size * "
        "data-parallel size * gradient_accumulation_steps. Two given, the third follows.",
        default=8, aliases=("batch_size",), minimum=1, unit="sequences",
        engines={**_torch("sequences per update"), "deepspeed": "`train_batch_size`"},
    ),
    Hyperparameter(
        "per_device_train_batch_size", "Training", "whole number",
        "Sequences that one device takes at once. By default what global_batch_size needs.",
        aliases=("micro_batch_size",), minimum=1, unit="sequences",
        engines={
            **_torch("sequences per forward pass"),
            "deepspeed": "`train_micro_batch_size_per_gpu`",
        },
    ),
    Hyperparameter(
        "gradient_accumulation_steps", "Training", "whole number",
        "Forward passes before the gradients are synchronized and the weights updated. By default "
        "what global_batch_size needs, or 1.",
        aliases=("gradient_synchronization_frequency",), minimum=1, unit="forward passes",
        engines={
            **_torch("forward passes per update; gradients are synchronized in the last one"),
            "deepspeed": "`gradient_accumulation_steps`",
        },
    ),
    Hyperparameter(
        "warmup_steps", "Training", "whole number",
        "Steps over which the learning rate rises from 0 to learning_rate.",
        default=0, minimum=0, unit="steps", off=0, only_with=((_SCHEDULE, _WARMS_UP),),
        engines=_trainer("linear warmup before the schedule"),
    ),
    Hyperparameter(
        "warmup_ratio", "Training", "number",
        "The same as a part of all steps. Instead of warmup_steps.",
        minimum=0, maximum=1, off=0.0, only_with=((_SCHEDULE, _WARMS_UP),),
        engines=_trainer("linear warmup before the schedule"),
    ),
    Hyperparameter(
        "fp16", "Training", "true or false",
        "Compute in 16-bit floating point, with loss scaling.",
        default=False, off=False,
        engines={**_torch("autocast to float16"), "deepspeed": "`fp16.enabled`"},
    ),
    Hyperparameter(
        "bf16", "Training", "true or false",
        "Compute in bfloat16.",
        default=False, off=False,
        engines={
            **_torch("autocast to bfloat16"),
            "deepspeed": "`bf16.enabled`: weights in bfloat16, single precision in the optimizer",
        },
    ),
    Hyperparameter(
        "optim", "Training", "choice",
        "The optimizer.",
        default="adamw", aliases=("optimizer",),
        choices=("sgd", "adam", "adamw", "rmsprop", "adagrad"),
        engine_choices={"megatron": ("sgd", "adam", "adamw")},
        engines=_trainer("`torch.optim.SGD`, `Adam`, `AdamW`, `RMSprop`, `Adagrad`"),
    ),
    Hyperparameter(
        "momentum", "Training", "number",
        "The momentum of the gradient.",
        default=0.0, minimum=0, below=1, off=0.0, only_with=(("optim", ("sgd", "rmsprop")),),
        engines=_trainer("`momentum` of the optimizer"),
    ),
    Hyperparameter(
        "adam_beta1", "Training", "number",
        "Decay of the mean of the gradient.",
        default=0.9, minimum=0, below=1, only_with=(("optim", ("adam", "adamw")),),
        engines=_trainer("`betas[0]` of the optimizer"),
    ),
    Hyperparameter(
        "adam_beta2", "Training", "number",
        "Decay of the mean of the squared gradient.",
        default=0.999, minimum=0, below=1, only_with=(("optim", ("adam", "adamw")),),
        engines=_trainer("`betas[1]` of the optimizer"),
    ),
    Hyperparameter(
        "adam_epsilon", "Training", "number",
        "Added to the denominator of the update.",
        default=1e-8, above=0, only_with=(("optim", ("adam", "adamw")),),
        engines=_trainer("`eps` of the optimizer"),
    ),
    Hyperparameter(
        "weight_decay", "Training", "number",
        "How much the weights shrink in each step; biases and norms don't.",
        default=0.0, minimum=0, off=0.0, engines=_trainer("`weight_decay` of the optimizer"),
    ),
    Hyperparameter(
        "group_by_length", "Training", "true or false",
        "Put sequences of about the same length into a batch. Needs train.data.packing false.",
        default=False, off=False, engines=_trainer("order of the sampler"),
    ),
    Hyperparameter(
        _SCHEDULE, "Training", "choice",
        "How the learning rate changes over the training.",
        default="linear", aliases=("lr_scheduler",),
        choices=(
            "constant", "linear", "step", "exponential", "polynomial", *_COSINES, "cyclic",
            "one_cycle", "reduce_on_plateau",
        ),
        engines=_trainer("the schedule, advanced once per step"),
    ),
    Hyperparameter(
        "lr_step_size", "Training", "whole number",
        "Steps between two reductions.",
        default=100, minimum=1, unit="steps", only_with=((_SCHEDULE, ("step",)),),
        engines=_trainer("`step_size` of the schedule"),
    ),
    Hyperparameter(
        "lr_gamma", "Training", "number",
        "The factor of each reduction: every lr_step_size steps (step), every step (exponential).",
        default_by={"step": 0.1, "exponential": 0.99}, above=0, maximum=1,
        only_with=((_SCHEDULE, ("step", "exponential")),),
        engines=_trainer("`gamma` of the schedule"),
    ),
    Hyperparameter(
        "lr_end", "Training", "number",
        "The learning rate at the end; not above learning_rate.",
        default=0.0, minimum=0, only_with=((_SCHEDULE, ("polynomial", *_COSINES)),),
        engines=_trainer("lower bound of the schedule"),
    ),
    Hyperparameter(
        "lr_power", "Training", "number",
        "The exponent of the polynomial.",
        default=1.0, above=0, only_with=((_SCHEDULE, ("polynomial",)),),
        engines=_trainer("exponent of the schedule"),
    ),
    Hyperparameter(
        "lr_num_cycles", "Training", "number",
        "Waves of the cosine (0.5: from the peak down to the end), or restarts.",
        default_by={"cosine": 0.5, "cosine_with_restarts": 1.0}, above=0,
        only_with=((_SCHEDULE, _COSINES),),
        engines=_trainer("cycles of the schedule"),
    ),
    Hyperparameter(
        "lr_cyclic_mode", "Training", "choice",
        "Whether all cycles have the same height (triangular) or each has half of the one before.",
        default="triangular", choices=("triangular", "triangular2"),
        only_with=((_SCHEDULE, ("cyclic",)),),
        engines=_trainer("`mode` of the schedule"),
    ),
    Hyperparameter(
        "lr_base", "Training", "number",
        "The lower bound of the cycles; not above learning_rate.",
        default=0.0, minimum=0, only_with=((_SCHEDULE, ("cyclic",)),),
        engines=_trainer("`base_lr` of the schedule"),
    ),
    Hyperparameter(
        "lr_step_size_up", "Training", "whole number",
        "Steps of the rising half of a cycle.",
        default=100, minimum=1, unit="steps", only_with=((_SCHEDULE, ("cyclic",)),),
        engines=_trainer("`step_size_up` of the schedule"),
    ),
    Hyperparameter(
        "lr_pct_start", "Training", "number",
        "The part of the training in which the learning rate rises.",
        default=0.3, above=0, below=1, only_with=((_SCHEDULE, ("one_cycle",)),),
        engines=_trainer("`pct_start` of the schedule"),
    ),
    Hyperparameter(
        "lr_div_factor", "Training", "number",
        "The first learning rate is learning_rate divided by this.",
        default=25.0, minimum=1, only_with=((_SCHEDULE, ("one_cycle",)),),
        engines=_trainer("`div_factor` of the schedule"),
    ),
    Hyperparameter(
        "lr_final_div_factor", "Training", "number",
        "The last learning rate is the first one divided by this.",
        default=1e4, minimum=1, only_with=((_SCHEDULE, ("one_cycle",)),),
        engines=_trainer("`final_div_factor` of the schedule"),
    ),
    Hyperparameter(
        "lr_patience", "Training", "whole number",
        "Evaluations without improvement before the learning rate is reduced.",
        default=10, minimum=0, unit="evaluations",
        only_with=((_SCHEDULE, ("reduce_on_plateau",)),),
        engines=_trainer("`patience` of the schedule"),
    ),
    Hyperparameter(
        "lr_factor", "Training", "number",
        "The factor of each reduction.",
        default=0.1, above=0, below=1, only_with=((_SCHEDULE, ("reduce_on_plateau",)),),
        engines=_trainer("`factor` of the schedule"),
    ),
    Hyperparameter(
        "lr_threshold", "Training", "number",
        "The relative change of the objective that counts as improvement.",
        default=1e-4, minimum=0, only_with=((_SCHEDULE, ("reduce_on_plateau",)),),
        engines=_trainer("`threshold` of the schedule"),
    ),
    Hyperparameter(
        "early_stopping_patience", "Training", "whole number",
        "Evaluations without improvement of the objective before the training ends.",
        minimum=1, unit="evaluations", only_with=_EVALUATES,
        engines=_trainer("ends the training early"),
    ),
    Hyperparameter(
        "early_stopping_threshold", "Training", "number",
        "The change of the objective that counts as improvement.",
        default=0.0, aliases=("early_stop_threshold",), minimum=0, off=0.0,
        only_with=(("early_stopping_patience", ANY),),
        engines=_trainer("ends the training early"),
    ),
    Hyperparameter(
        "max_grad_norm", "Training", "number",
        "Gradients are scaled down to this norm; 0 leaves them as they are.",
        default=1.0, aliases=("clip_grad_norm", "gradient_clipping"), minimum=0,
        engines={**_torch("`max_norm` of `clip_grad_norm_`"), "deepspeed": "`gradient_clipping`"},
    ),
    Hyperparameter(
        "grad_norm_type", "Training", "number",
        "The p of that norm; inf is the largest absolute value.",
        default=2.0, aliases=("norm_type",), above=0,
        engines=_torch("`norm_type` of `clip_grad_norm_`"),
    ),
    Hyperparameter(
        "clip_grad_value", "Training", "number",
        "Each element of the gradients is clipped to ± this, before the norm is.",
        above=0, engines=_torch("`clip_value` of `clip_grad_value_`"),
    ),
    Hyperparameter(
        "eval_strategy", "Training", "choice",
        "When to evaluate: never, every eval_steps steps, or after each epoch.",
        default="steps", aliases=("evaluation_strategy",), choices=("no", "steps", "epoch"),
        engines=_trainer("when the evaluation runs"),
    ),
    Hyperparameter(
        "eval_steps", "Training", "whole number",
        "Steps between two evaluations.",
        default=100, minimum=1, unit="steps", only_with=(("eval_strategy", ("steps",)),),
        engines=_trainer("when the evaluation runs"),
    ),
    Hyperparameter(
        "save_steps", "Training", "whole number",
        "Steps between two checkpoints; by default the time of checkpoint.interval.",
        aliases=("checkpoint_frequency",), minimum=1, unit="steps",
        engines=_trainer("when a checkpoint is written"),
    ),
    Hyperparameter(
        "logging_steps", "Training", "whole number",
        "Steps between two lines of training metrics.",
        default=10, minimum=1, unit="steps", engines=_trainer("when metrics are reported"),
    ),
    Hyperparameter(
        "load_best_model_at_end", "Training", "true or false",
        "Take the best checkpoint by the objective as the result, instead of the last one.",
        default=False, off=False, only_with=_EVALUATES,
        engines=_trainer("loads `checkpoints/best` at the end"),
    ),
    Hyperparameter(
        "seed", "Training", "whole number",
        "The seed of everything random: weights, order of the data, dropout, sampling.",
        default=0, minimum=0, maximum=2**32 - 1,
        engines={
            **_trainer("seeds Python, NumPy and torch"),
            **_sampling("seed", "sampling_seed"),
            "transformers": "`set_seed`",
        },
    ),
    Hyperparameter(
        "dropout", "Training", "number",
        "The probability that an activation is dropped during training.",
        default=0.0, minimum=0, below=1, off=0.0, engines=_trainer("dropout of the model"),
    ),
    Hyperparameter(
        "label_smoothing_factor", "Training", "number",
        "The probability that is spread over the wrong tokens.",
        default=0.0, minimum=0, below=1, off=0.0,
        engines=_trainer("smooths the targets of the loss"),
    ),
    Hyperparameter(
        "loss_function", "Training", "choice",
        "The loss: cross entropy, focal loss, or cross entropy with a z-loss.",
        default="cross_entropy", aliases=("loss",), choices=("cross_entropy", "focal", "z_loss"),
        engines=_trainer("the loss of the next token"),
    ),
    Hyperparameter(
        "focal_gamma", "Training", "number",
        "How much the focal loss neglects tokens that are predicted well.",
        default=2.0, minimum=0, only_with=(("loss_function", ("focal",)),),
        engines=_trainer("exponent of the focal loss"),
    ),
    Hyperparameter(
        "z_loss_weight", "Training", "number",
        "The weight of the squared log-partition in the z-loss.",
        default=1e-4, minimum=0, only_with=(("loss_function", ("z_loss",)),),
        engines=_trainer("weight of the z-loss"),
    ),
    Hyperparameter(
        "init_method", "Training", "choice",
        "The distribution of the first weights.",
        default="normal", aliases=("weight_init",),
        choices=("normal", "xavier_uniform", "xavier_normal", "he_uniform", "he_normal"),
        new_model=True, engines=_trainer("`torch.nn.init` of all matrices"),
    ),
    Hyperparameter(
        "init_std", "Training", "number",
        "The standard deviation of the first weights.",
        default=0.02, aliases=("initializer_range",), above=0,
        only_with=(("init_method", ("normal",)),), new_model=True,
        engines=_trainer("`std` of `torch.nn.init.normal_`"),
    ),
    Hyperparameter(
        "init_gain", "Training", "number",
        "A factor of the first weights.",
        default=1.0, above=0,
        only_with=(
            ("init_method", ("xavier_uniform", "xavier_normal", "he_uniform", "he_normal")),
        ),
        new_model=True, engines=_trainer("gain of the initialization"),
    ),
    Hyperparameter(
        "hidden_act", "Training", "choice",
        "The activation function of the feed-forward layers.",
        default="silu", aliases=("activation_function",),
        choices=(
            "silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "relu2",
            "leaky_relu", "mish", "sigmoid", "tanh",
        ),
        new_model=True, engines=_trainer("`hidden_act` of the model's config"),
    ),
)  # fmt: skip

_FINE_TUNING = (
    Hyperparameter(
        "fine_tuning_method", "Fine-tuning", "choice",
        "Which weights learn: all, all but the first or some layers (freeze), only the last ones "
        "and the head (top), or small added ones (lora, adapter, prompt_tuning).",
        default="full", choices=("full", "freeze", "top", "lora", "adapter", "prompt_tuning"),
        engine_choices={"megatron": ("full",)},
        engines=_trainer("which weights have gradients; lora and prompt_tuning by peft"),
    ),
    Hyperparameter(
        "num_frozen_layers", "Fine-tuning", "whole number",
        "How many of the first layers, with the embeddings before them, don't learn.",
        minimum=0, unit="layers", only_with=(("fine_tuning_method", ("freeze",)),),
        engines=_trainer("no gradients for these layers"),
    ),
    Hyperparameter(
        "frozen_layers", "Fine-tuning", "list",
        "The layers that don't learn, counted from 0. Instead of num_frozen_layers.",
        minimum=0, only_with=(("fine_tuning_method", ("freeze",)),),
        engines=_trainer("no gradients for these layers"),
    ),
    Hyperparameter(
        "num_top_layers", "Fine-tuning", "whole number",
        "How many of the last layers learn besides the head; 0 is the head alone.",
        default=0, minimum=0, unit="layers", only_with=(("fine_tuning_method", ("top",)),),
        engines=_trainer("no gradients for the other layers"),
    ),
    Hyperparameter(
        "r", "Fine-tuning", "whole number",
        "The rank of LoRA's matrices.",
        default=8, aliases=("lora_r", "lora_rank"), minimum=1, only_with=_LORA,
        engines=_trainer("`LoraConfig.r`"),
    ),
    Hyperparameter(
        "lora_alpha", "Fine-tuning", "number",
        "LoRA's scale: its update is multiplied by lora_alpha / r.",
        default=16.0, above=0, only_with=_LORA, engines=_trainer("`LoraConfig.lora_alpha`"),
    ),
    Hyperparameter(
        "target_modules", "Fine-tuning", "list",
        "The modules that LoRA is added to, by name.",
        default=["q_proj", "v_proj"], only_with=_LORA,
        engines=_trainer("`LoraConfig.target_modules`"),
    ),
    Hyperparameter(
        "lora_dropout", "Fine-tuning", "number",
        "Dropout before LoRA's matrices.",
        default=0.0, minimum=0, below=1, only_with=_LORA,
        engines=_trainer("`LoraConfig.lora_dropout`"),
    ),
    Hyperparameter(
        "bias", "Fine-tuning", "choice",
        "Which biases learn with LoRA.",
        default="none", choices=("none", "all", "lora_only"), only_with=_LORA,
        engines=_trainer("`LoraConfig.bias`"),
    ),
    Hyperparameter(
        "task_type", "Fine-tuning", "choice",
        "The task of the adapted model.",
        default="CAUSAL_LM", choices=("CAUSAL_LM",),
        only_with=(("fine_tuning_method", ("lora", "prompt_tuning")),),
        engines=_trainer("`task_type` of peft's config"),
    ),
    Hyperparameter(
        "adapter_size", "Fine-tuning", "whole number",
        "The width of the bottleneck of the adapters.",
        default=32, minimum=1, only_with=(("fine_tuning_method", ("adapter",)),),
        engines=_trainer("width of the added layers"),
    ),
    Hyperparameter(
        "num_virtual_tokens", "Fine-tuning", "whole number",
        "How many learned vectors come before the text.",
        default=16, minimum=1, unit="tokens",
        only_with=(("fine_tuning_method", ("prompt_tuning",)),),
        engines=_trainer("`PromptTuningConfig.num_virtual_tokens`"),
    ),
    Hyperparameter(
        "layerwise_lr_decay", "Fine-tuning", "number",
        "The learning rate of each layer is this times that of the layer above it.",
        default=1.0, above=0, maximum=1, engines=_trainer("one parameter group per layer"),
    ),
)  # fmt: skip

_MODEL = (
    Hyperparameter(
        "vocab_size", "Model", "whole number",
        "Tokens of the tokenizer that is trained on the data. Not with train.data.tokenizer.",
        default=2000, aliases=("token_num",), minimum=259, unit="tokens", new_model=True,
        engines=_trainer("size of the tokenizer and of the embeddings"),
    ),
    Hyperparameter(
        "max_length", "Model", "whole number",
        "Tokens of a training sequence.",
        default=128, aliases=("max_seq_length", "seq_length"), minimum=2, unit="tokens",
        engines=_trainer("length of a sequence; positions of a new model"),
    ),
    Hyperparameter(
        "add_eos_token", "Model", "true or false",
        "End each document with the end-of-sequence token.",
        default=True, engines=_trainer("tokenization of the data"),
    ),
    Hyperparameter(
        "hidden_size", "Model", "whole number",
        "Width of the model: a multiple of num_attention_heads.",
        default=128, aliases=("embedding_size",), minimum=2, new_model=True,
        engines=_trainer("`hidden_size` of the model's config"),
    ),
    Hyperparameter(
        "num_hidden_layers", "Model", "whole number",
        "Number of layers.",
        default=4, aliases=("num_layers", "layers"), minimum=1, unit="layers", new_model=True,
        engines=_trainer("`num_hidden_layers` of the model's config"),
    ),
    Hyperparameter(
        "num_attention_heads", "Model", "whole number",
        "Attention heads of a layer.",
        default=4, aliases=("heads",), minimum=1, unit="heads", new_model=True,
        engines=_trainer("`num_attention_heads` of the model's config"),
    ),
    Hyperparameter(
        "num_key_value_heads", "Model", "whole number",
        "Heads for keys and values: a divisor of num_attention_heads, which is the default.",
        aliases=("kv_heads",), minimum=1, unit="heads", new_model=True,
        engines=_trainer("`num_key_value_heads` of the model's config"),
    ),
    Hyperparameter(
        "intermediate_size", "Model", "whole number",
        "Width of the feed-forward layers; by default 8/3 of hidden_size, in steps of 64.",
        aliases=("ffn_hidden_size",), minimum=1, new_model=True,
        engines=_trainer("`intermediate_size` of the model's config"),
    ),
    Hyperparameter(
        "tie_word_embeddings", "Model", "true or false",
        "Use the same matrix for the embeddings and for the head.",
        default=True, new_model=True,
        engines=_trainer("`tie_word_embeddings` of the model's config"),
    ),
)  # fmt: skip

_GENERATION = (
    Hyperparameter(
        "temperature", "Generation", "number",
        "How evenly tokens are drawn; 0 always takes the likeliest.",
        default=1.0, minimum=0,
        engines=_sampling("temperature", "temperature", "temperature"),
    ),
    Hyperparameter(
        "top_k", "Generation", "whole number",
        "Draw from this many of the likeliest tokens; 0 is all.",
        default=0, minimum=0, unit="tokens", engines=_sampling("top_k", "top_k", "top_k"),
    ),
    Hyperparameter(
        "top_p", "Generation", "number",
        "Draw from the likeliest tokens that together have this probability.",
        default=1.0, above=0, maximum=1, engines=_sampling("top_p", "top_p", "top_p"),
    ),
    Hyperparameter(
        "num_beams", "Generation", "whole number",
        "Width of the beam search; 1 is none.",
        default=1, minimum=1, engines=_sampling(transformers="num_beams"),
    ),
    Hyperparameter(
        "max_tokens", "Generation", "whole number",
        "The longest answer.",
        default=256, aliases=("max_new_tokens",), minimum=1, unit="tokens",
        engines=_sampling("max_tokens", "max_new_tokens", "max_new_tokens"),
    ),
    Hyperparameter(
        "min_tokens", "Generation", "whole number",
        "The shortest answer.",
        default=0, aliases=("min_new_tokens",), minimum=0, unit="tokens", off=0,
        engines=_sampling("min_tokens", "min_new_tokens", "min_new_tokens"),
    ),
    Hyperparameter(
        "logprobs", "Generation", "true or false",
        "Return the log-probability of each token of the answer as well.",
        default=False, off=False,
        engines={
            **_sampling("logprobs"),
            "sglang": "`return_logprob`",
            "transformers": "`output_logits`",
        },
    ),
    Hyperparameter(
        "repetition_penalty", "Generation", "number",
        "Divides the scores of tokens that were there before; 1 is none.",
        default=1.0, above=0,
        engines={
            **_sampling("repetition_penalty", transformers="repetition_penalty"),
            "sglang": '`sampling_params["repetition_penalty"]`, for tokens of the answer alone',
        },
    ),
    Hyperparameter(
        "presence_penalty", "Generation", "number",
        "Subtracted from the scores of tokens of the answer so far.",
        default=0.0, minimum=-2, maximum=2,
        engines=_sampling("presence_penalty", "presence_penalty"),
    ),
    Hyperparameter(
        "frequency_penalty", "Generation", "number",
        "Subtracted from the scores of tokens as often as they are in the answer so far.",
        default=0.0, minimum=-2, maximum=2,
        engines=_sampling("frequency_penalty", "frequency_penalty"),
    ),
    Hyperparameter(
        "stop", "Generation", "list",
        "Texts that end the answer.",
        aliases=("stop_strings",), engines=_sampling("stop", "stop", "stop_strings"),
    ),
    Hyperparameter(
        "n", "Generation", "whole number",
        "Answers to each prompt.",
        default=1, aliases=("num_return_sequences",), minimum=1,
        engines=_sampling("n", "n", "num_return_sequences"),
    ),
    Hyperparameter(
        "json_schema", "Generation", "JSON",
        "The answer is JSON of this schema.",
        aliases=("guided_json",), engines=_sampling("structured_outputs.json", "json_schema"),
    ),
    Hyperparameter(
        "regex", "Generation", "text",
        "The answer matches this regular expression.",
        aliases=("guided_regex",), engines=_sampling("structured_outputs.regex", "regex"),
    ),
    Hyperparameter(
        "grammar", "Generation", "text",
        "The answer follows this grammar (EBNF).",
        aliases=("guided_grammar",), engines=_sampling("structured_outputs.grammar", "ebnf"),
    ),
    Hyperparameter(
        "choice", "Generation", "list",
        "The answer is one of these texts.",
        aliases=("guided_choice",), engines=_sampling("structured_outputs.choice"),
    ),
)  # fmt: skip

_HARDWARE = (
    Hyperparameter(
        "device_map", "Hardware", "JSON",
        "Where the model is: a device, auto, or a mapping of modules to devices.",
        engines={"transformers": "`from_pretrained(device_map=…)`"},
    ),
    Hyperparameter(
        "data_parallel_size", "Hardware", "whole number",
        "Copies of the model that share the batch. It follows from the processes (resources.nodes "
        "* resources.processes) and from how many of them share one copy.",
        aliases=("dp_degree", "dp"), minimum=1,
        engines={**_torch("number of processes"),
                 "deepspeed": "number of processes",
                 "vllm": "`data_parallel_size`", "sglang": "`dp_size`"},
    ),
    Hyperparameter(
        "tensor_parallel_size", "Hardware", "whole number",
        "GPUs that share each layer.",
        aliases=("tp",), minimum=1,
        engines={"vllm": "`tensor_parallel_size`", "sglang": "`tp_size`"},
    ),
    Hyperparameter(
        "pipeline_parallel_size", "Hardware", "whole number",
        "Groups of GPUs that share the layers among them.",
        aliases=("pp",), minimum=1,
        engines={"vllm": "`pipeline_parallel_size`", "sglang": "`pp_size`"},
    ),
    Hyperparameter(
        "context_parallel_size", "Hardware", "whole number",
        "GPUs that share each sequence.",
        aliases=("cp",), minimum=1,
    ),
    Hyperparameter(
        "sequence_parallel", "Hardware", "true or false",
        "Share what lies between the layers of a tensor-parallel model as well.",
        default=False, aliases=("sp",), off=False,
    ),
    Hyperparameter(
        "virtual_pipeline_stages", "Hardware", "whole number",
        "Parts of the model that each pipeline stage holds in turn.",
        aliases=("vpp",), minimum=1,
    ),
    Hyperparameter(
        "ddp_backend", "Hardware", "choice",
        "How processes exchange gradients; by default nccl with GPUs and gloo without.",
        choices=("nccl", "gloo"),
        engines=_trainer("`backend` of `init_process_group`"),
    ),
    Hyperparameter(
        "gradient_checkpointing", "Hardware", "true or false",
        "Compute activations again in the backward pass instead of keeping them.",
        default=False, aliases=("recompute",), off=False,
        engines=_trainer("`gradient_checkpointing_enable` of the model"),
    ),
    Hyperparameter(
        "fsdp", "Hardware", "true or false",
        "Share weights, gradients and optimizer states among the processes, layer by layer.",
        default=False, off=False,
        engines=_torch("FSDP2: `fully_shard` of each layer and of what is around them"),
    ),
    Hyperparameter(
        "zero_stage", "Hardware", "whole number",
        "What the processes share: 1 optimizer states, 2 and gradients, 3 and weights; 0 nothing.",
        default=2, minimum=0, maximum=3,
        engines={"deepspeed": "`zero_optimization.stage`"},
    ),
    Hyperparameter(
        "offload", "Hardware", "choice",
        "What is kept in the host's memory: the optimizer's states, or (stage 3) weights as well.",
        default="none", choices=("none", "optimizer", "all"), off="none",
        engines={"deepspeed": "`offload_optimizer` and `offload_param` of `zero_optimization`"},
    ),
)  # fmt: skip

_MEGATRON: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "num_train_epochs", "max_steps", "learning_rate", "global_batch_size",
            "per_device_train_batch_size", "warmup_steps", "warmup_ratio", "momentum",
            "adam_beta1", "adam_beta2", "adam_epsilon", "weight_decay", "group_by_length",
            _SCHEDULE, "lr_step_size", "lr_gamma", "lr_end", "lr_power", "lr_num_cycles",
            "lr_cyclic_mode", "lr_base", "lr_step_size_up", "lr_pct_start", "lr_div_factor",
            "lr_final_div_factor", "lr_patience", "lr_factor", "lr_threshold",
            "early_stopping_patience", "early_stopping_threshold", "eval_strategy", "eval_steps",
            "save_steps", "logging_steps", "load_best_model_at_end", "seed", "init_method",
            "init_std", "init_gain", "fine_tuning_method", "vocab_size", "max_length",
            "add_eos_token", "tie_word_embeddings", "ddp_backend",
        ),
        "as torch",
    ),
    "gradient_accumulation_steps": "forward passes of the pipeline per update; by default as many "
    "as it has stages",
    "fp16": "`Float16Module`, with `DynamicGradScaler`",
    "bf16": "`Float16Module`; the optimizer keeps the weights in single precision",
    "optim": "`torch.optim` `SGD`, `Adam`, `AdamW`, or Transformer Engine's",
    "max_grad_norm": "`clip_grad` of the optimizer",
    "dropout": "`hidden_dropout` and `attention_dropout`",
    "hidden_act": "`activation_func`, with a gate",
    "hidden_size": "`hidden_size`",
    "num_hidden_layers": "`num_layers`",
    "num_attention_heads": "`num_attention_heads`",
    "num_key_value_heads": "`num_query_groups`",
    "intermediate_size": "`ffn_hidden_size`",
    "data_parallel_size": "processes that `DistributedDataParallel` averages gradients over, and "
    "that share the optimizer's state",
    "tensor_parallel_size": "`tensor_model_parallel_size`",
    "pipeline_parallel_size": "`pipeline_model_parallel_size`, 1F1B",
    "context_parallel_size": "`context_parallel_size`; needs Transformer Engine",
    "sequence_parallel": "`sequence_parallel`",
    "virtual_pipeline_stages": "`virtual_pipeline_model_parallel_size`, interleaved",
    "gradient_checkpointing": "full recomputation of each layer",
}  # fmt: skip
"""What the engine megatron does with the parameters that it uses."""


def _with_megatron(row: Hyperparameter) -> Hyperparameter:
    how = _MEGATRON.get(row.name)
    return row if how is None else replace(row, engines={**row.engines, "megatron": how})


HYPERPARAMETERS: tuple[Hyperparameter, ...] = tuple(
    map(_with_megatron, (*_TRAINING, *_FINE_TUNING, *_MODEL, *_GENERATION, *_HARDWARE))
)

BY_NAME: Mapping[str, Hyperparameter] = {row.name: row for row in HYPERPARAMETERS}

ALIASES: Mapping[str, str] = {alias: row.name for row in HYPERPARAMETERS for alias in row.aliases}
"""Accepted names that are stored under another one."""

LAYOUT = (
    "data_parallel_size",
    "tensor_parallel_size",
    "pipeline_parallel_size",
    "context_parallel_size",
    "sequence_parallel",
    "virtual_pipeline_stages",
    "zero_stage",
    "offload",
    "fsdp",
    "ddp_backend",
)
"""How the work is shared among processes: it does not change what comes out."""

ELSEWHERE: Mapping[str, str] = {
    "gpus": "resources.gpus",
    "num_gpus": "resources.gpus",
    "nodes": "resources.nodes",
    "num_nodes": "resources.nodes",
    "model": "train.model",
    "model_name_or_path": "train.model",
    "packing": "train.data.packing",
    "save_total_limit": "checkpoint.keep",
    "metric_for_best_model": "objective.metric",
    "greater_is_better": "objective.mode",
}
"""What people look for among the hyperparameters, and where a recipe has it."""
