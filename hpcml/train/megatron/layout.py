"""How this training's processes share the model and the batch."""

from __future__ import annotations

from hpcml.layout import Layout, Shape
from hpcml.train.config import TrainingConfig, TrainingError
from hpcml.train.llama import Llama


def choose(config: TrainingConfig, shape: Llama, processes: int) -> tuple[Layout, int, int]:
    """The layout that the configuration asks for.

    Args:
        config: how many processes share what, and the batch.
        shape: the model.
        processes: how many run.

    Returns:
        The layout, sequences of a forward pass, and forward passes of an update.

    Raises:
        TrainingError: it does not fit the model, the batch or the processes; says what would.
    """
    wanted = Layout(
        tensor=config.tensor_parallel_size,
        pipeline=config.pipeline_parallel_size,
        context=config.context_parallel_size,
        virtual=config.virtual_pipeline_stages,
        sequence=config.sequence_parallel,
    )
    needs = Shape(
        layers=shape.num_hidden_layers,
        heads=shape.num_attention_heads,
        key_value_heads=shape.num_key_value_heads,
        intermediate=shape.intermediate_size,
        length=config.max_length,
        batch=config.global_batch_size,
        micro_batch=config.per_device_train_batch_size,
        passes=config.gradient_accumulation_steps,
    )
    copies, rest = divmod(processes, wanted.model)
    if rest or not copies:
        mistakes = [
            f"{wanted.model} processes share each copy of the model, and {processes} are no "
            "multiple of that"
        ]
    elif config.data_parallel_size not in (None, copies):
        mistakes = [
            f"data_parallel_size is {config.data_parallel_size}, but {processes} processes run, "
            f"and {wanted.model} share each copy of the model"
        ]
    else:
        layout = Layout(**{**vars(wanted), "data": copies})
        mistakes = [f"{name}: {message}" for name, message in layout.mistakes(needs)]
        passes = layout.passes(needs)
        if not mistakes and passes is not None:
            return layout, config.global_batch_size // copies // passes, passes
    nearest = wanted.nearest(needs, processes)
    advice = f"the nearest layout that works: {nearest}" if nearest else "no other layout fits"
    raise TrainingError(f"{'; '.join(mistakes)}; {advice}")
