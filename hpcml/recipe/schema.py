"""What a recipe may contain. The descriptions here are the reference page of docs/recipe.md."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from hpcml.recipe.container import BindText, ImageName
from hpcml.recipe.slurm import SlurmOptions
from hpcml.recipe.stages import SHARED
from hpcml.recipe.units import Duration, Memory
from hpcml.recipe.validation import Block

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_METRIC = re.compile(r"\S{1,128}")
_OF_WORKER = {
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR",
    "MASTER_PORT",
}  # fmt: skip


def _whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value  # 1e3


def _recipe_name(value: str) -> str:
    if not _NAME.fullmatch(value):
        raise ValueError(
            f"{value!r} is not a name; use letters, digits and . _ -, beginning with a letter or "
            "a digit, at most 64 characters"
        )
    return value


def _metric_name(value: str) -> str:
    if not _METRIC.fullmatch(value):
        raise ValueError(f"{value!r} is not the name of a metric; it has no spaces")
    return value


def _variable_name(value: str) -> str:
    if not _VARIABLE.fullmatch(value):
        raise ValueError(
            f"{value!r} is not the name of an environment variable; use letters, digits and _, "
            "not beginning with a digit"
        )
    if value in _OF_WORKER or value.startswith("HPCML_"):
        raise ValueError(f"{value} is set by hpcml for each process and can't be given")
    return value


def _one_or_more(value: Any) -> Any:
    return [value] if isinstance(value, Mapping) else value


def _one_text(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _exclusion(value: Any) -> Any:
    if not isinstance(value, (str, dict)) or not value:
        raise ValueError(
            "each entry is a mapping (parameter: value) or an expression such as "
            "params.learning_rate > 0.1"
        )
    return value


# More than the largest machines have: a slip, which would only be noticed much later.
_MOST = 10_000_000
Count = Annotated[int, Field(ge=1, le=_MOST), BeforeValidator(_whole)]
Budget = Annotated[int, Field(ge=0, le=_MOST), BeforeValidator(_whole)]
Samples = Annotated[int, Field(ge=1), BeforeValidator(_whole)]
Seed = Annotated[int, Field(ge=0), BeforeValidator(_whole)]
Text = Annotated[str, Field(min_length=1)]
VariableName = Annotated[str, AfterValidator(_variable_name)]
Values = Annotated[list[Any], Field(min_length=1)]
Group = Annotated[dict[str, Values], Field(min_length=1)]
Written = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]
"""Text that a file may have without quotes, and that counts as it is written."""
_GROUP = {"type": "object", "additionalProperties": {"type": "array"}}
Groups = Annotated[
    list[Group],
    BeforeValidator(_one_or_more),
    WithJsonSchema({"anyOf": [_GROUP, {"type": "array", "items": _GROUP}]}),
]
_NAME_OF_FILE = {"type": "string", "minLength": 1}
Files = Annotated[
    list[Text],
    Field(min_length=1),
    BeforeValidator(_one_text),
    WithJsonSchema(
        {"anyOf": [_NAME_OF_FILE, {"type": "array", "items": _NAME_OF_FILE, "minItems": 1}]}
    ),
]
Exclusion = Annotated[
    Any, BeforeValidator(_exclusion), WithJsonSchema({"type": ["string", "object"]})
]
Point = Annotated[dict[str, Any], Field(min_length=1)]


class RandomSweep(Block):
    """Parameters that are drawn at random."""

    samples: Samples = Field(description="How many samples to draw.")
    seed: Seed = Field(
        default=0, description="The same seed always draws the same samples; more begin the same."
    )
    params: dict[str, dict[str, Any]] = Field(
        min_length=1,
        description="For each parameter one of `{uniform: [a, b]}`, `{loguniform: [a, b]}`, "
        "`{int: [a, b]}` (both included), `{choice: [x, y, …]}`.",
    )


class Search(Block):
    """Rounds of cells, each proposed by optuna from what the rounds before found."""

    sampler: Literal["tpe", "cmaes", "qmc", "random"] = Field(
        default="tpe",
        description="`tpe`: a tree-structured Parzen estimator; `cmaes`: CMA-ES, an evolution "
        "strategy for numbers; `qmc`: a quasi-random sequence; `random`: chance. The last two do "
        "not look at what was found.",
    )
    rounds: Count = Field(description="How many rounds there are, one after another.")
    cells: Count = Field(description="Cells of each round, which run side by side.")
    seed: Seed = Field(
        default=0, description="The same seed and the same results give the same proposals."
    )
    params: dict[str, dict[str, Any]] = Field(
        min_length=1, description="As those of `random`: what each parameter may be."
    )
    metric: Annotated[str, AfterValidator(_metric_name)] | None = Field(
        default=None, description="What is sought; by default the objective's metric."
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="Which is better; by default as the objective says, or `min`."
    )


class Halving(Block):
    """Successive halving: all cells train a part of the way, the best go on, and so forth."""

    metric: Annotated[str, AfterValidator(_metric_name)] | None = Field(
        default=None, description="What decides who goes on; by default the objective's metric."
    )
    mode: Literal["min", "max"] | None = Field(
        default=None, description="Which is better; by default as the objective says, or `min`."
    )
    factor: Annotated[int, Field(ge=2, le=_MOST), BeforeValidator(_whole)] = Field(
        default=3,
        description="One of so many cells goes on to the next rung, to so many times the steps.",
    )
    rungs: Annotated[int, Field(ge=2, le=64), BeforeValidator(_whole)] = Field(
        default=3, description="How many rungs there are; the last one ends with all steps."
    )
    steps: Count | None = Field(
        default=None,
        description="For `command`, the steps of a whole training; for `train` it is `max_steps`.",
    )


class Sweep(Block):
    """The parameters that vary. Every part is an axis, and the sweep is the product of all."""

    grid: dict[str, Values] = Field(
        default_factory=dict, description="Parameter: list of values. Each one is an axis."
    )
    zip: Groups = Field(
        default_factory=list,
        description="Parameters whose lists belong together, value by value: one axis. A list of "
        "such mappings makes several axes.",
    )
    random: RandomSweep | None = Field(default=None, description="An axis of random samples.")
    points: list[Point] = Field(
        default_factory=list, description="An axis of points that are written out, as mappings."
    )
    exclude: list[Exclusion] = Field(
        default_factory=list,
        description="Cells to leave out: those where all parameters of a mapping are equal, or "
        "where an expression such as `params.optim == 'sgd' and params.learning_rate > 0.1` is "
        "true.",
    )
    when: dict[str, Text] = Field(
        default_factory=dict,
        description="Swept parameter: condition. Where it is false, the parameter isn't swept, "
        "and the cells that are the same then become one.",
    )
    search: Search | None = Field(
        default=None,
        description="Parameters that are proposed in rounds; then it is the only part of the "
        "sweep.",
    )
    halving: Halving | None = Field(
        default=None, description="Train only the best cells to the end; by default all of them."
    )


class Objective(Block):
    """The metric by which cells and checkpoints are compared."""

    metric: Annotated[str, AfterValidator(_metric_name)] = Field(
        description="Name of a reported metric."
    )
    mode: Literal["min", "max"] = Field(default="min", description="Which is better, less or more.")


class Resources(Block):
    """What one cell needs."""

    nodes: Count = Field(default=1, description="Nodes.")
    gpus: Budget = Field(default=0, description="GPUs of each node.")
    processes: Count | None = Field(
        default=None, description="Processes on each node; by default one for each GPU, or one."
    )
    cpus: Count = Field(default=1, description="CPU cores of each process.")
    memory: Annotated[Memory, Field(gt=0)] | None = Field(
        default=None, description="Memory of each node, such as `16G`; by default the site's."
    )
    time: Annotated[Duration, Field(gt=0)] | None = Field(
        default=None,
        description="How long one job may run, in any form of Slurm (`30` and `30:00` are 30 "
        "minutes, `04:00:00` 4 hours) or as `1h30m`; by default the site's. Longer work continues "
        "in the next job from its checkpoint.",
    )

    @property
    def processes_per_node(self) -> int:
        """Processes on each node."""
        return self.processes or max(1, self.gpus)

    @property
    def world_size(self) -> int:
        """Processes on all nodes together."""
        return self.nodes * self.processes_per_node


class Spending(Block):
    """A budget: what may take more is submitted only by who says that it shall."""

    gpu_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Hours of GPUs, for cells that have GPUs."
    )
    core_hours: Annotated[float, Field(gt=0)] | None = Field(
        default=None, description="Hours of cores, for cells without GPUs."
    )


class Array(Block):
    """How cells are put into jobs."""

    pack: Count = Field(default=1, description="Cells that share one job.")
    max_running: Count | None = Field(
        default=None, description="Jobs that may run at the same time; by default no limit."
    )


class Checkpoint(Block):
    """How often a training saves, and which checkpoints stay."""

    interval: Literal["auto"] | Annotated[Duration, Field(gt=0)] = Field(
        default="auto",
        description="The time between two checkpoints. `auto` is the one that loses the least: it "
        "follows from how long saving takes and how often the site's nodes fail. The parameter "
        "`save_steps` counts steps instead. A training that is asked to stop always saves.",
    )
    keep: Count = Field(default=2, description="How many of the last ones stay, besides the best.")


class Retry(Block):
    """How often a cell is started again after it failed, by cause. Stops are always free."""

    application: Budget = Field(default=0, description="It failed by itself.")
    oom: Budget = Field(default=0, description="It had too little memory.")
    killed: Budget = Field(default=0, description="A signal of somebody else ended it.")


class Command(Block):
    """A program that is run for each cell, without a shell."""

    run: list[Written] = Field(
        min_length=1,
        description="The program and its arguments, each taken as written. `{{ params.x }}` is "
        "the value of a parameter.",
    )
    directory: Text | None = Field(
        default=None,
        description="Where it runs; by default in the recipe's folder, as it is in the snapshot. "
        "A relative path starts there.",
    )


class Data(Block):
    """What to train on: exactly one of `source` and `files`."""

    source: Literal["python-stdlib"] | None = Field(
        default=None,
        description="A corpus that is always there: `python-stdlib`, the source text of Python's "
        "standard library.",
    )
    files: list[Text] = Field(
        default_factory=list,
        description="Text files, with wildcards; a relative path is relative to the recipe.",
    )
    tokenizer: Text | None = Field(
        default=None,
        description="A folder with a Hugging Face tokenizer; by default the model's, or one is "
        "trained on the data.",
    )
    eval_fraction: float = Field(
        default=0.05, gt=0, lt=1, description="The part of the documents kept for evaluation."
    )
    packing: bool = Field(
        default=True,
        description="Fill each sequence with documents, so that none is short.",
    )


class Train(Block):
    """A training of a language model."""

    engine: Literal["torch", "deepspeed", "megatron"] = Field(
        default="torch",
        description="What trains: `torch`; `deepspeed`, with ZeRO; or `megatron`, with 3D "
        "parallelism. See docs/training.md and docs/megatron.md.",
    )
    model: Text | None = Field(
        default=None,
        description="A folder with a Hugging Face model to fine-tune, relative to the recipe; by "
        "default a new model is made from the hyperparameters.",
    )
    data: Data = Field(description="What to train on.")
    deepspeed: Text | dict[str, Any] | None = Field(
        default=None,
        description="For the engine `deepspeed`, what is put over the configuration that hpcml "
        "makes from the hyperparameters: a mapping, or a JSON file relative to the recipe.",
    )


class InferInput(Block):
    """The rows to answer."""

    files: Files = Field(
        description="Files or folders, with wildcards; a relative path is relative to the recipe. "
        "One may stand without a list."
    )
    format: Literal["parquet", "jsonl", "csv", "openai"] | None = Field(
        default=None,
        description="What they are; by default as the name ends (`.parquet`, `.jsonl`, `.csv`; a "
        "folder is Parquet). `openai` is a batch file of the OpenAI API.",
    )
    key: Text | None = Field(
        default=None,
        description="The column that names a row; by default rows are numbered from 0. With "
        "`openai` it is `custom_id`.",
    )


class InferOutput(Block):
    """Where the answers go: the rows of the input, each once, in their order."""

    path: Text | None = Field(
        default=None,
        description="A file, or with `rows_per_file` a folder, relative to the recipe; by default "
        "it is in the cell's folder.",
    )
    format: Literal["parquet", "openai"] = Field(
        default="parquet", description="`openai`: the output of a batch of the OpenAI API."
    )
    columns: list[Text] = Field(
        default_factory=list,
        description="Columns of the input that the output has as well; `['*']` is all.",
    )
    rows_per_file: Count | None = Field(
        default=None, description="Write a folder of files of so many rows."
    )


class Infer(Block):
    """A language model answers the rows of a table. Exactly one of `prompt`, `messages` and an
    input of the format `openai` says what is asked.
    """

    engine: Literal["transformers", "vllm", "sglang"] = Field(
        default="transformers", description="What answers."
    )
    model: Text = Field(
        description="A folder with a Hugging Face model, or a checkpoint of a training, relative "
        "to the recipe."
    )
    adapter: Text | None = Field(
        default=None, description="A folder with a LoRA adapter for it, as peft writes it."
    )
    engine_args: dict[str, Any] = Field(
        default_factory=dict,
        description="Further arguments of the engine, by its own names; unknown ones are an error.",
    )
    input: InferInput = Field(description="The rows to answer.")
    prompt: Text | None = Field(
        default=None,
        description="What each row asks: a Jinja template over its columns, such as "
        "`Translate: {{ text }}`.",
    )
    chat: bool = Field(
        default=False, description="The prompt is the message of a user in a chat with the model."
    )
    system: Text | None = Field(
        default=None, description="A message of the system before it, a template as well."
    )
    messages: Text | None = Field(
        default=None,
        description="The column with the messages of a chat, each with `role` and `content`.",
    )
    chat_template: Text | None = Field(
        default=None,
        description="A file with a chat template, instead of the tokenizer's own.",
    )
    output: InferOutput = Field(default_factory=InferOutput, description="Where the answers go.")
    workers: Count = Field(
        default=1,
        description="Jobs that share the rows of a cell; each has the resources of a cell.",
    )
    shard_rows: Count | None = Field(
        default=None,
        description="Rows that a worker claims at a time; by default decided by their number.",
    )
    max_failed: float = Field(
        default=0.01,
        ge=0,
        le=1,
        description="The part of the rows that may be without an answer; with more the cell "
        "fails, though its output is written.",
    )


class Container(Block):
    """The image that cells run in, at sites that have containers. Job scripts stay outside."""

    image: ImageName = Field(
        description="A `.sif` or `.sqsh` file or a sandbox folder, absolute or in the site's "
        "folder of images, a short name of `hpcml container list`, such as `torch`, or a reference "
        "such as `docker://nvcr.io/nvidia/pytorch:25.06-py3`."
    )
    binds: list[BindText] = Field(
        default_factory=list,
        description="Folders and files that cells see, as `source[:destination[:ro]]` with "
        "absolute paths; a colon that belongs to a path is written `\\:`. The runs root, and "
        "what is trained on, is there anyway.",
    )
    env: dict[VariableName, Written] = Field(
        default_factory=dict,
        description="Environment variables inside the image, each taken as written, such as "
        "`PATH`. `PYTHONPATH` comes after hpcml's own.",
    )
    python: Text = Field(
        default="python3", description="The image's Python, 3.9 or newer; a name or a path."
    )


class Code(Block):
    """The snapshot of the project (the recipe's git repository, or its folder) that a command
    runs from.
    """

    limit: Annotated[Memory, Field(gt=0)] = Field(
        default=100 * 1024**2, description="How large it may be; more is an error."
    )


class Recipe(Block):
    """What to run, over which parameters, with which resources."""

    name: Annotated[str, AfterValidator(_recipe_name)] = Field(
        description="The name of the run's folder and of its jobs: letters, digits, `.`, `_`, `-`."
    )
    kind: Literal["command", "train", "infer"] = Field(
        description="`command`: a program of yours; `train`: hpcml trains a language model; "
        "`infer`: a language model answers the rows of a table."
    )
    description: str | None = Field(default=None, description="A note for people.")
    params: dict[str, Any] = Field(
        default_factory=dict,
        description="Parameters that are the same in all cells. For `train` and `infer`, "
        "hyperparameters; for `command` whatever the program takes, also nested.",
    )
    parallel: dict[str, Any] = Field(
        default_factory=dict,
        description="For `train` and `infer`, parameters of the group Hardware: `{tp: 2, pp: "
        "2}`; the same as in `params`, and in one of the two places only.",
    )
    sweep: Sweep = Field(default_factory=Sweep, description="Parameters that vary.")
    objective: Objective | None = Field(
        default=None,
        description="The metric to compare by; for `train` by default the least `eval_loss`.",
    )
    resources: Resources = Field(default_factory=Resources, description="What one cell needs.")
    slurm: SlurmOptions = Field(
        default_factory=SlurmOptions,
        description="Options of sbatch for sites with Slurm; elsewhere they are not used.",
    )
    budget: Spending = Field(
        default_factory=Spending,
        description="What a submission may take at most, as its preview counts it; over that, "
        "`sweep` and `infer` ask, or refuse where nobody can answer, unless `--yes` is given.",
    )
    array: Array = Field(default_factory=Array, description="How cells are put into jobs.")
    checkpoint: Checkpoint = Field(
        default_factory=Checkpoint,
        description="How often a training saves, and which checkpoints stay.",
    )
    retry: Retry = Field(default_factory=Retry, description="Attempts after failures.")
    env: dict[VariableName, Written] = Field(
        default_factory=dict,
        description="Environment variables, each taken as written; `{{ params.x }}` is the value "
        "of a parameter.",
    )
    env_from: list[VariableName] = Field(
        default_factory=list,
        description="Environment variables, such as passwords, whose values are taken from the "
        "environment where the run is started and are never written down.",
    )
    needs: list[Text] = Field(
        default_factory=list,
        description="In a stage: the stages that must have succeeded before it begins.",
    )
    command: Command | None = Field(
        default=None, description="The program; exactly with kind `command`."
    )
    train: Train | None = Field(
        default=None, description="The training; exactly with kind `train`."
    )
    infer: Infer | None = Field(
        default=None, description="The inference; exactly with kind `infer`."
    )
    container: Container | None = Field(
        default=None, description="The image that cells run in; by default none."
    )
    code: Code = Field(default_factory=Code, description="The snapshot of the project.")


class StagedRecipe(Block):
    """A recipe of several stages. Each is a recipe without a name, and a run of its own."""

    name: Annotated[str, AfterValidator(_recipe_name)] = Field(
        description="The stages' runs are called `<name>.<stage>`."
    )
    description: str | None = Field(default=None, description="A note for people.")
    stages: dict[str, dict[str, Any]] = Field(
        min_length=1,
        description="The stages by name. Each has the keys of a recipe, and `needs`. What is "
        "given beside `stages` holds for every stage that does not have the key itself.",
    )
    resources: Any = None
    slurm: Any = None
    container: Any = None
    array: Any = None
    checkpoint: Any = None
    retry: Any = None
    env: Any = None
    env_from: Any = None
    code: Any = None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of recipes, with a description of each key."""
    staged = StagedRecipe.model_json_schema()
    simple = Recipe.model_json_schema(ref_template="#/$defs/{model}")
    definitions = {**simple.pop("$defs", {}), "Recipe": simple}
    staged["properties"]["stages"]["additionalProperties"] = {"$ref": "#/$defs/Stage"}
    stage = {key: value for key, value in simple.items() if key != "required"}
    stage["required"] = [key for key in simple.get("required", []) if key != "name"]
    for name in SHARED:
        if name in simple["properties"]:
            staged["properties"][name] = simple["properties"][name]
    definitions |= {"Stage": stage, "StagedRecipe": staged}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A recipe of hpcml",
        "anyOf": [{"$ref": "#/$defs/Recipe"}, {"$ref": "#/$defs/StagedRecipe"}],
        "$defs": definitions,
    }
