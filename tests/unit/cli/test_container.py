"""`hpcml container`: what it lists, and what it refuses before any job."""

from __future__ import annotations

import json
import os
import re
import shlex
from pathlib import Path

import click
import pytest

from hpcml.cli.container import command
from hpcml.errors import UserError
from hpcml.launch import errand
from hpcml.site.image_check import NEEDS, checks
from hpcml.site.images import known_images

from .conftest import Invoke

APPTAINER = "name: here\nscheduler: local\ncontainer: {{runtime: apptainer, images: {images}}}\n"
PYXIS = "name: here\nscheduler: slurm\ncontainer: {{runtime: pyxis, images: {images}}}\n"
VOLCANO = "name: here\nscheduler: volcano\npython: python3\n"
NONE = "name: here\nscheduler: local\n"
NO_FOLDER = "name: here\nscheduler: local\ncontainer: {{runtime: apptainer}}\n"


def site(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "here.yaml"
    path.write_text(text.format(images=tmp_path / "images"))
    return path


def test_list(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "megatron-0.16.1-1.sif").write_bytes(bytes(3 * 2**20))
    (tmp_path / "images" / "mine.sif").write_bytes(bytes(5 * 2**20))
    here = site(tmp_path, APPTAINER)
    printed = invoke("container", "list", "--site", here).output
    lines = {line.split()[0]: line for line in printed.splitlines() if not line.startswith(" ")}
    assert "3M" in lines["megatron"]
    assert "train megatron" in lines["megatron"]
    assert "not there" in lines["torch"]
    assert "5M" in lines["mine.sif:"]
    document = json.loads(invoke("container", "list", "--site", here, "--json").output)
    assert document["folder"] == str(tmp_path / "images")
    (other,) = document["others"]
    assert other["path"].endswith("mine.sif")
    images = {image["name"]: image for image in document["images"]}
    assert images["megatron"]["file"]["size"] == 3 * 2**20
    assert images["vllm"]["serves"] == ["command", "infer vllm"]


@pytest.mark.parametrize("text", [NONE, NO_FOLDER, VOLCANO])
def test_list_without_a_folder(invoke: Invoke, tmp_path: Path, text: str) -> None:
    printed = invoke("container", "list", "--site", site(tmp_path, text)).output
    assert "has no folder of images" in printed
    assert "sglang" in printed


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        (APPTAINER, "build megatrn", "did you mean 'megatron'"),
        (APPTAINER, "build torch --base x.sif", "--base x.sif: give a path that begins with /"),
        (APPTAINER, "pull nvcr.io/nvidia/pytorch:25.12-py3", "there is no image 'nvcr.io"),
        (APPTAINER, "pull http://x/y", "give docker://registry/name:tag"),
        (APPTAINER, "pull docker://a/b:1 --as b", "there is no image 'b'"),
        (APPTAINER, "check", "give an IMAGE, or a --recipe"),
        (APPTAINER, "check torch", "torch-2.9.0-1.sif; make it: hpcml container build torch"),
        (APPTAINER, "check torch", "container.image: there is no image"),
        (APPTAINER, "build base --set resources.gpus=99", "resources.gpus: asks for 99 GPUs"),
        (PYXIS, "build torch", "hpcml container pull docker://REGISTRY/torch:2.9.0-1 --as torch"),
        (PYXIS, "pull oras://a/b:1", "give docker://"),
        (PYXIS, "check torch", "docker build -f torch.Dockerfile"),
        (VOLCANO, "build torch", "Kubernetes takes images from a registry"),
        (NONE, "build torch", "has no container runtime"),
        (NO_FOLDER, "build torch", "has no folder of images; add it to the site's file"),
    ],
)
def test_what_is_refused(invoke: Invoke, tmp_path: Path, text: str, words: str, said: str) -> None:
    with pytest.raises(UserError) as refused:
        invoke("container", *words.split(), "--site", site(tmp_path, text))
    assert said in str(refused.value)
    assert "hpcml-" not in str(refused.value)  # a file that nobody else sees
    assert not (tmp_path / "images").exists()


def test_an_image_that_is_there_is_kept(invoke: Invoke, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "torch-2.9.0-1.sif").touch()
    with pytest.raises(UserError, match="is there already; --force"):
        invoke("container", "build", "torch", "--site", site(tmp_path, APPTAINER))


SLURM = "name: here\nscheduler: slurm\ncontainer: {{runtime: apptainer, images: {images}}}\n"


@pytest.mark.parametrize("where", ["compile_plan", "create_run"])
def test_ctrl_c_before_there_is_a_run(
    invoke: Invoke, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(errand, where, interrupted)
    with pytest.raises(click.Abort):
        invoke("container", "build", "base", "--site", site(tmp_path, SLURM))


def test_a_check_leaves_no_job_that_sbatch_said_nothing_of(
    invoke: Invoke, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        # The job is queued, and its number is not printed.
        "sbatch": 'for word; do case $word in *.sh) echo "$word 0" > queued;; esac; done',
        "squeue": "[ ! -e queued ] || "
        "printf '7_0\\037PENDING\\037Priority\\037%s\\n' \"$(cat queued)\"",
        "scancel": 'echo "$@" > cancelled; rm queued',
    }
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in commands.items():
        (programs / name).write_text(f"#!/bin/sh\ncd {tmp_path}\n{text}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "mine.sif").touch()
    with pytest.raises(UserError, match="sbatch named no single job"):
        invoke("container", "check", "mine.sif", "--site", site(tmp_path, SLURM))
    assert (tmp_path / "cancelled").read_text().split() == ["7_[0]"]
    assert not list(root.glob(".container-*"))


PAGE = (Path(__file__).parents[3] / "docs" / "containers.md").read_text(encoding="utf-8")


def test_the_commands_of_the_page_can_be_given() -> None:
    lines = re.findall(r"\$ hpcml container ([^#\n]*)", PAGE)
    assert len(lines) >= 7
    for line in lines:
        name, *words = shlex.split(line)
        chosen = command.commands[name]
        context = chosen.make_context(name, words)
        named = context.params.get("name") or "base"
        assert named in known_images(), line
    for text in re.findall(r"docker push \S+/(\S+)", PAGE):
        name, _, tag = text.partition(":")
        assert known_images()[name].tag == tag


def test_the_page_shows_what_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """The example of a check is what is said of an image that has Python alone."""
    from hpcml.cli.site import print_checks

    no = "ModuleNotFoundError: No module named 'torch'"
    need = NEEDS["train torch"]
    report = {
        "python": "3.11.2",
        "executable": "/usr/bin/python3",
        "libc": "glibc-2.36",
        "user_packages": [],
        "shared_memory": 24105 * 2**20,
        "torch": {"error": no},
        "sum": None,
        "packages": {name: {"version": None, "error": no} for name in need.packages},
        "modules": {},
    }
    click.echo("/shared/containers/base-3.12.13-1.sif on n1")
    assert not print_checks(checks([report], [need.kind], 2, 0, True), len(need.kind))
    assert f"```\n{capsys.readouterr().out}```" in PAGE
