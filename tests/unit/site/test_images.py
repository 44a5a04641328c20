"""The list of images, their definitions, and what a check says of an image."""

from __future__ import annotations

import configparser
import re
from pathlib import Path
from typing import Any

import pytest

from hpcml import resources
from hpcml.errors import UserError
from hpcml.site.image_check import NEEDS, OLDEST, checks, wanted
from hpcml.site.images import (
    Image,
    file_of_reference,
    files_of,
    known_image,
    known_images,
    with_base,
)

ROOT = Path(__file__).parents[3]
IMAGES = list(known_images().values())


def numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:2]]


def pins(text: str) -> dict[str, str]:
    """What a definition installs, without the lines that are comments."""
    lines = [line for line in text.splitlines() if not line.strip().startswith("#")]
    return dict(re.findall(r"([\w.-]+)==([\w.]+)", "\n".join(lines)))


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_definitions_are_what_the_list_says(image: Image) -> None:
    definition = image.definition.read_text()
    assert definition.startswith(f"Bootstrap: docker\nFrom: {image.base}\n")
    assert f"    hpcml.image {image.name}-{image.tag}\n" in definition
    docker = image.definition.with_suffix(".Dockerfile").read_text()
    assert re.findall(r"^FROM (.*)$", docker, re.MULTILINE) == [image.base]
    assert f"LABEL hpcml.image={image.name}-{image.tag}\n" in docker
    assert f"-t registry.example.org/hpcml/{image.name}:{image.tag} ." in docker
    assert pins(definition) == pins(docker) == image.adds


def test_every_definition_is_in_the_list() -> None:
    names = {path.name for path in resources.folder("containers").iterdir()} - {"__pycache__"}
    expected = {f"{image.name}{end}" for image in IMAGES for end in (".def", ".Dockerfile")}
    assert names == {"images.yaml", *expected}


@pytest.mark.parametrize("image", IMAGES, ids=lambda image: image.name)
def test_bases_are_pinned_and_have_what_their_recipes_need(image: Image) -> None:
    registry, _, name = image.base.partition("/")
    assert "." in registry
    assert re.search(r":[\w.-]*\d", name), "a tag that names a version"
    assert "latest" not in name
    assert image.source.startswith("https://")
    for kind in image.serves:
        for package in NEEDS[kind].packages:
            if package in image.versions:
                assert numbers(image.versions[package]) >= numbers(OLDEST[package])
    engines = {kind.partition(" ")[2] for kind in image.serves} & {"deepspeed", "vllm", "sglang"}
    assert engines <= set(image.versions)


def test_every_kind_of_recipes_has_an_image() -> None:
    assert {kind for image in IMAGES for kind in image.serves} == set(NEEDS)


def test_the_oldest_versions_are_those_of_the_package() -> None:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    extras = config["options.extras_require"]
    parts = ("torch", "deepspeed", "megatron", "vllm", "sglang")
    lines = "\n".join([config["options"]["install_requires"], *(extras[part] for part in parts)])
    required = dict(re.findall(r"^([\w-]+)(?:>=([\d.]+))?$", lines, re.MULTILINE))
    assert {name: required[name] or "0" for name in OLDEST} == OLDEST


def test_versions_that_are_tested_are_those_of_the_images() -> None:
    made = (ROOT / "Makefile").read_text()
    assert f"deepspeed=={known_image('deepspeed').adds['deepspeed']}" in made


@pytest.mark.parametrize(
    ("reference", "runtime", "file"),
    [
        ("docker://nvcr.io/nvidia/pytorch:25.12-py3", "apptainer", "pytorch_25.12-py3.sif"),
        ("docker://host:5000/a/b", "apptainer", "b_latest.sif"),
        ("docker://a.b/c:1@sha256:00ff", "pyxis", "c_1.sqsh"),
        ("oras://a.b/c:1", "singularity", "c_1.sif"),
    ],
)
def test_files_of_references(reference: str, runtime: str, file: str) -> None:
    assert file_of_reference(reference, runtime) == file


@pytest.mark.parametrize("reference", ["docker://", "docker://a/", "docker://a/b c:1"])
def test_references_without_a_name(reference: str) -> None:
    with pytest.raises(UserError, match="docker://registry/name:tag"):
        file_of_reference(reference, "apptainer")


def test_a_definition_with_another_base() -> None:
    definition = known_image("torch").definition.read_text()
    _, _, rest = definition.partition("\n\n")
    for base, header in (
        ("/images/x y.sif", "Bootstrap: localimage\nFrom: /images/x y.sif"),
        ("docker://mirror.example.org/p:1", "Bootstrap: docker\nFrom: mirror.example.org/p:1"),
    ):
        assert with_base(definition, base) == f"{header}\n\n{rest}"
    for base in ("x.sif", "http://x/y", "/x\n%post", "/{{ x }}"):
        with pytest.raises(UserError, match="--base"):
            with_base(definition, base)


def test_files_in_a_folder_of_images(tmp_path: Path) -> None:
    for name in ("a.sif", "b.sqsh", ".c.sif.1.part", ".d.sif", "e.txt"):
        (tmp_path / name).write_bytes(b"x" * 10)
    (tmp_path / "gone.sif").symlink_to(tmp_path / "nothing")
    assert {name: file.size for name, file in files_of(tmp_path).items()} == {
        "a.sif": 10,
        "b.sqsh": 10,
    }
    assert files_of(tmp_path / "no") == {}


# --- what a check says


def report(rank: int = 0, **changes: Any) -> dict[str, Any]:
    """What a process reports from an image for training that has everything and two GPUs."""
    kind = NEEDS["train torch"]
    found = {
        "rank": rank,
        "host": "n1",
        "python": "3.12.3",
        "executable": "/usr/bin/python3",
        "libc": "glibc-2.39",
        "user_packages": [],
        "shared_memory": 8 * 2**30,
        "torch": {"version": "2.9.0", "cuda": "13.0", "gpus": ["H100", "H100"], "nccl": "2.28.3"},
        "sum": {"backend": "nccl", "processes": 2, "right": True, "seconds": 3.25},
        "packages": {name: {"version": "99.1", "error": None} for name in kind.packages},
        "modules": {kind.module: None},
    }
    return {**found, **changes}


def said(*reports: dict[str, Any], gpus: int = 2, required: bool = True) -> dict[str, str]:
    """The lines of a check, with the words of the command line, by their names."""
    words = {True: "ok", False: "FAIL", None: "skipped"}
    found = checks(reports, ["train torch"], 2, gpus, required)
    return {check.name: f"{words[check.good]} {check.seen}" for check in found}


def test_a_good_image() -> None:
    lines = said(report(), report(1))
    assert all(line.startswith("ok") for line in lines.values())
    assert lines["torch"] == "ok 2.9.0, built for CUDA 13.0"
    assert lines["GPUs"] == "ok 2 of H100; NCCL 2.28.3"
    assert lines["all-reduce"] == "ok 2 processes by nccl, 3.2 s with the meeting"


NO_GPUS = {"version": "2.9.0", "cuda": "13.0", "gpus": [], "nccl": None}


@pytest.mark.parametrize(
    ("changes", "line", "words"),
    [
        ({"torch": NO_GPUS}, "GPUs", "2, and torch sees none; set container.gpu"),
        ({"torch": {**NO_GPUS, "gpus": ["H100"]}}, "GPUs", "the job had 2, and torch sees 1; set"),
        ({"torch": {**NO_GPUS, "cuda": None}}, "GPUs", "whose torch is built for CUDA"),
        ({"torch": {**NO_GPUS, "gpu_error": "old driver"}}, "GPUs", "and old driver; set"),
        ({"torch": {"error": "ImportError: x"}, "sum": None}, "torch", "ImportError: x"),
        ({"shared_memory": 64 * 2**20}, "/dev/shm", "64M, and NCCL and loaders of data take more"),
        ({"shared_memory": None}, "/dev/shm", "there is none"),
        ({"user_packages": ["/home/a/.local/lib"]}, "~/.local", "/home/a/.local/lib hides"),
        ({"modules": {NEEDS["train torch"].module: "ImportError: cannot import name 'x'"}},
         "train torch", "hpcml.train.torch_engine cannot be imported: ImportError"),
        ({"sum": {"backend": "nccl", "processes": 2, "error": "timeout", "seconds": 120.0}},
         "all-reduce", "2 processes by nccl: timeout; NCCL_DEBUG=INFO"),
        ({"sum": {"backend": "nccl", "processes": 2, "right": False, "seconds": 1.0}},
         "all-reduce", "the sum is wrong"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_said(changes: dict[str, Any], line: str, words: str) -> None:
    lines = said(report(**changes), report(1))
    assert lines[line].startswith("FAIL")
    assert words in lines[line]


def test_a_process_that_came_to_no_end() -> None:
    assert said(report())["all-reduce"] == "FAIL 2 processes by nccl: only 1 came to an end"


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ({"version": None, "error": "ModuleNotFoundError: no"}, "it has no peft 0.18 or newer"),
        ({"version": "0.9.2", "error": None}, "peft is 0.9.2, and 0.18 or newer is needed"),
        ({"version": "0.20", "error": "OSError: libx"}, "peft 0.20 cannot be imported (OSError"),
    ],
)
def test_a_package_that_will_not_do(found: dict[str, Any], words: str) -> None:
    packages = {**report()["packages"], "peft": found}
    line = said(report(packages=packages), report(1))["train torch"]
    assert line.startswith(f"FAIL {words}")
    assert line.endswith("an image for it: hpcml container build torch")
    line = said(report(packages=packages), report(1), required=False)["train torch"]
    assert line.startswith(f"skipped {words}")


def test_a_version_before_its_release_is_as_new_as_that() -> None:
    packages = {
        **report()["packages"],
        "torch": {"version": "2.10.0a0+b4e4.nv25.12", "error": None},
    }
    assert said(report(packages=packages), report(1))["train torch"].startswith("ok")


def test_what_the_probe_is_asked_for() -> None:
    assert wanted(["command"]) == {"packages": {}, "modules": [], "torch": False}
    asked = wanted(["train megatron"])
    assert asked["packages"]["megatron-core"] == "megatron.core"
    assert asked["modules"] == ["hpcml.train.megatron.engine"]
    assert asked["torch"]
