"""What recipes need of an image, and what of that an image has, in words."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from hpcml.recipe.schema import Recipe
from hpcml.recipe.units import format_memory
from hpcml.site.check import Check
from hpcml.site.images import known_images

#: The oldest versions that do, by the names of the distributions: those of setup.cfg.
OLDEST = {
    "torch": "2.6",
    "transformers": "5.20",
    "accelerate": "1.2",
    "peft": "0.18",
    "tokenizers": "0.21",
    "numpy": "1.26",
    "pyarrow": "15",
    "jinja2": "3.1",
    "deepspeed": "0.18",
    "megatron-core": "0.16",
    "psutil": "0",
    "vllm": "0.14",
    "sglang": "0.5",
}
_MODULES = {"megatron-core": "megatron.core"}
_TRAINING = ("torch", "transformers", "tokenizers", "numpy", "pyarrow")
_INFERENCE = ("numpy", "pyarrow", "jinja2")

# What processes of one machine share by NCCL and by workers that load data; Docker gives 64 MiB.
_SHARED_MEMORY = 2**30


@dataclass(frozen=True)
class Need:
    """What a kind of recipes needs of an image.

    Attributes:
        kind: the kind with the engine, as ``serves`` of an image has it.
        packages: the distributions.
        module: what of hpcml is imported in the image; None for a command.
    """

    kind: str
    packages: tuple[str, ...] = ()
    module: str | None = None


NEEDS = {
    need.kind: need
    for need in (
        Need("command"),
        Need("train torch", (*_TRAINING, "accelerate", "peft"), "hpcml.train.torch_engine"),
        Need(
            "train deepspeed",
            (*_TRAINING, "accelerate", "peft", "deepspeed"),
            "hpcml.train.deepspeed_engine",
        ),
        Need(
            "train megatron", (*_TRAINING, "megatron-core", "psutil"), "hpcml.train.megatron.engine"
        ),
        Need(
            "infer transformers",
            (*_INFERENCE, "torch", "transformers"),
            "hpcml.infer.engines.transformers",
        ),
        Need("infer vllm", (*_INFERENCE, "torch", "vllm"), "hpcml.infer.engines.vllm"),
        Need("infer sglang", (*_INFERENCE, "torch", "sglang"), "hpcml.infer.engines.sglang"),
    )
}


def kind_of(recipe: Recipe) -> str:
    """The kind of a recipe with its engine, such as ``train torch``."""
    part = recipe.train or recipe.infer
    return f"{recipe.kind} {part.engine}" if part else recipe.kind


def wanted(kinds: Sequence[str]) -> dict[str, Any]:
    """What the probe is asked to look at, for these kinds of recipes."""
    needs = [NEEDS[kind] for kind in kinds]
    packages = dict.fromkeys(name for need in needs for name in need.packages)
    return {
        "packages": {name: _MODULES.get(name, name) for name in packages},
        "modules": [need.module for need in needs if need.module],
        "torch": "torch" in packages,
    }


def checks(
    reports: Sequence[dict[str, Any]],
    kinds: Sequence[str],
    processes: int,
    gpus: int,
    required: bool,
) -> Iterator[Check]:
    """What is good, what failed, and what an image is not made for.

    Args:
        reports: what each process reported, the first process first.
        kinds: kinds of recipes that were asked about.
        processes: how many processes there were.
        gpus: how many GPUs they had together.
        required: whether the image has to serve all of these kinds.
    """
    report = reports[0]
    yield _python(report)
    yield _user_packages(report)
    if "torch" in report:
        yield from _torch(report, gpus, required)
        yield _sum([found for found in reports if found.get("sum")], processes)
    yield _shared_memory(report, gpus)
    for kind in kinds:
        yield _kind(NEEDS[kind], report, required)


def _python(report: dict[str, Any]) -> Check:
    # The probe has run, so that it is new enough for the worker.
    seen = f"{report['python']} ({report['executable']}), {report['libc'] or 'another libc'}"
    return Check("python", True, seen)


def _user_packages(report: dict[str, Any]) -> Check:
    if not report["user_packages"]:
        return Check("~/.local", True, "stays outside")
    return Check(
        "~/.local",
        False,
        f"{report['user_packages'][0]} hides packages of the image: take PYTHONNOUSERSITE out of "
        "the container's env, or the folder out of PYTHONPATH",
    )


def _torch(report: dict[str, Any], gpus: int, required: bool) -> Iterator[Check]:
    found = report["torch"]
    if "error" in found:
        yield Check("torch", False if required else None, found["error"])
        return
    build = f"for CUDA {found['cuda']}" if found["cuda"] else "for CPUs"
    yield Check("torch", True, f"{found['version']}, built {build}")
    if not gpus:
        yield Check("GPUs", None, "the job had none; --gpus N asks for some")
    elif len(found["gpus"]) >= gpus:
        names = ", ".join(dict.fromkeys(found["gpus"]))
        yield Check("GPUs", True, f"{len(found['gpus'])} of {names}; NCCL {found['nccl']}")
    else:
        why = found.get("gpu_error", f"torch sees {len(found['gpus']) or 'none'}")
        hint = "take an image whose torch is built for CUDA"
        if found["cuda"]:
            hint = (
                "set container.gpu of the site to nv (rocm for AMD), and look whether the node's "
                f"driver is new enough for CUDA {found['cuda']} (nvidia-smi shows what it knows)"
            )
        yield Check("GPUs", False, f"the job had {gpus}, and {why}; {hint}")


def _sum(reports: Sequence[dict[str, Any]], processes: int) -> Check:
    if not reports:
        return Check("all-reduce", None, "there is no torch")
    first = reports[0]["sum"]
    errors = [found["sum"]["error"] for found in reports if "error" in found["sum"]]
    what = f"{processes} process{'es' if processes > 1 else ''} by {first['backend']}"
    if errors:
        return Check("all-reduce", False, f"{what}: {errors[0]}; NCCL_DEBUG=INFO tells more")
    if len(reports) < processes:
        return Check("all-reduce", False, f"{what}: only {len(reports)} came to an end")
    if not all(found["sum"]["right"] for found in reports):
        return Check("all-reduce", False, f"{what}: the sum is wrong")
    return Check("all-reduce", True, f"{what}, {first['seconds']:.1f} s with the meeting")


def _shared_memory(report: dict[str, Any], gpus: int) -> Check:
    size = report["shared_memory"]
    if size is None:
        return Check("/dev/shm", False, "there is none; processes of one machine need it")
    seen = format_memory(size // 2**20 * 2**20)
    if gpus and size < _SHARED_MEMORY:
        return Check(
            "/dev/shm",
            False,
            f"{seen}, and NCCL and loaders of data take more: set volcano.shared_memory, or bind "
            "the host's /dev/shm",
        )
    return Check("/dev/shm", True, seen)


def _kind(need: Need, report: dict[str, Any], required: bool) -> Check:
    """Whether the image serves a kind of recipes."""
    lacks, seen = lacking(need, report)
    if not lacks:
        return Check(need.kind, True, ", ".join(seen) or "needs Python alone")
    names = [name for name, image in known_images().items() if need.kind in image.serves]
    hint = f"; an image for it: hpcml container build {names[0]}" if names else ""
    return Check(need.kind, False if required else None, f"{'; '.join(lacks)}{hint}")


def lacking(need: Need, report: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What a kind of recipes lacks where the probe looked, in words, and the versions it has."""
    lacks: list[str] = []
    missing: list[str] = []
    seen: list[str] = []
    for name in need.packages:
        found = report["packages"][name]
        version, oldest = found["version"], OLDEST[name]
        if version is None and found["error"]:
            missing.append(name if oldest == "0" else f"{name} {oldest} or newer")
        elif found["error"]:
            lacks.append(f"{name} {version} cannot be imported ({found['error']})")
        elif version and _numbers(version) < _numbers(oldest):
            lacks.append(f"{name} is {version}, and {oldest} or newer is needed")
        else:
            seen.append(f"{name} {version}")
    if missing:
        lacks.insert(0, f"it has no {', '.join(missing)}")
    error = report["modules"].get(need.module) if need.module and not lacks else None
    if error:
        lacks.append(f"{need.module} cannot be imported: {error}")
    return lacks, seen


def _numbers(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with: of ``2.10.0a0+b4e4`` they are 2, 10 and 0."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else (0,)
