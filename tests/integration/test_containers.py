"""`hpcml container` with a real Apptainer: images are built, fetched and looked into."""

from __future__ import annotations

import hashlib
import io
import json
import signal
import subprocess
import sys
import tarfile
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.fixtures import SlurmCluster
from tests.conftest import Hpcml, of_folder, wait_until

ENVIRONMENT = {
    # What root lacks in a sandbox, and what costs time here.
    "APPTAINER_DROP_CAPS": "CAP_SYS_RESOURCE",
    "APPTAINER_MKSQUASHFS_ARGS": "-comp lz4",
    # The registry of these tests is on this machine.
    "APPTAINER_NOHTTPS": "1",
}
FILE = "base-3.12.13-1.sif"


def site(hpcml: Hpcml, images: Path, **more: Any) -> Path:
    text = {
        "name": "here",
        "scheduler": "local",
        "env": ENVIRONMENT,
        "container": {"runtime": "apptainer", "images": str(images)},
        **more,
    }
    return hpcml.write("here.yaml", json.dumps(text))


def left_in(images: Path) -> list[str]:
    """The files of a folder of images, without the lock and the cache, which stay."""
    names = (path.name for path in images.iterdir())
    return sorted(name for name in names if not name.startswith(".cache-") and ".lock" not in name)


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory, apptainer: Path) -> Path:
    """A folder with the image `base`, built from its definition on the tests' own Debian."""
    folder = tmp_path_factory.mktemp("build")
    images = folder / "images"
    hpcml = Hpcml(folder)
    here = site(hpcml, images)
    built = hpcml("container", "build", "base", "--site", here, "--base", apptainer)
    assert built.stdout == f"{images / FILE}\n"
    assert "Running post scriptlet" in built.stderr
    assert left_in(images) == [FILE]
    return images


def test_a_recipe_names_the_image_that_was_built(hpcml: Hpcml, images: Path) -> None:
    here = site(hpcml, images)
    listed = json.loads(hpcml("container", "list", "--site", here, "--json").stdout)
    files = {image["name"]: image["file"] for image in listed["images"]}
    assert files["base"]["path"] == str(images / FILE)
    assert files["base"]["size"] == (images / FILE).stat().st_size
    assert files["torch"] is None
    run = ["sh", "-c", 'echo "$LC_ALL"; cat /.singularity.d/labels.json']
    text = {"name": "x", "kind": "command", "container": {"image": "base"}, "command": {"run": run}}
    recipe = hpcml.write("recipe.yaml", json.dumps(text))
    hpcml("sweep", recipe, "--site", here)
    (cell,) = hpcml.cell_dirs()
    printed = (cell / "log.1.out").read_text()
    assert printed.startswith("C.UTF-8\n")
    assert '"hpcml.image": "base-3.12.13-1"' in printed


def test_an_image_that_is_not_there_is_named_before_anything_is_submitted(
    hpcml: Hpcml, images: Path
) -> None:
    text = "name: x\nkind: command\ncontainer: {image: torch}\ncommand: {run: [echo]}\n"
    recipe = hpcml.write("recipe.yaml", text)
    said = hpcml("sweep", recipe, "--site", site(hpcml, images), code=2).stderr
    assert f"recipe.yaml:3: container.image: there is no image {images}/torch-2.9.0-1.sif" in said
    assert "hpcml container build torch" in said
    again = hpcml("container", "build", "base", "--site", hpcml.folder / "here.yaml", code=2)
    assert f"{images / FILE} is there already; --force" in again.stderr


def test_a_check_says_what_a_recipe_lacks_and_leaves_nothing(
    hpcml: Hpcml, images: Path, apptainer: Path
) -> None:
    here = site(hpcml, images)
    assert "command" in hpcml("container", "check", "base", "--site", here).stdout
    recipe = hpcml.write("r.yaml", "name: r\nkind: train\ntrain: {data: {source: python-stdlib}}\n")
    options = ("--recipe", recipe, "--site", here)
    seen = hpcml("container", "check", apptainer, *options, code=1).stdout
    (line,) = [line for line in seen.splitlines() if "train torch" in line]
    assert line.startswith("FAIL")
    assert "it has no torch 2.6 or newer, transformers 5.20 or newer" in line
    assert "hpcml container build torch" in line
    # Without a recipe an image serves what it can.
    seen = hpcml("container", "check", apptainer, "--site", here).stdout
    assert "ok       command            needs Python alone" in seen
    assert "skipped  infer vllm" in seen
    # No Python that could report.
    recipe.write_text("name: r\nkind: command\ncontainer: {image: base, python: /no}\n"
                      "command: {run: [echo]}\n")  # fmt: skip
    seen = hpcml("container", "check", *options, code=1).stdout
    assert "FAIL     start" in seen
    assert "/no" in seen
    assert list((hpcml.folder / "runs").iterdir()) == []


def test_a_check_of_an_image_that_has_everything(hpcml: Hpcml, images: Path) -> None:
    """torch's processes meet inside the image, and hpcml's engine can be imported there."""
    folders = sorted({sys.prefix, sys.base_prefix} - {"/usr"})
    text = {
        "name": "r",
        "kind": "train",
        "container": {"image": "base", "python": sys.executable, "binds": folders},
        "train": {"data": {"source": "python-stdlib"}},
    }
    recipe = hpcml.write("recipe.yaml", json.dumps(text))
    seen = hpcml("container", "check", "--recipe", recipe, "--site", site(hpcml, images)).stdout
    assert "2 processes by gloo" in seen
    (line,) = [line for line in seen.splitlines() if "train torch" in line]
    assert line.startswith("ok")
    assert "transformers 5" in line


# --- fetching


class Registry(ThreadingHTTPServer):
    """A registry with the image ``things:1``, as the OCI's distribution specification has it.

    Attributes:
        open: while it isn't set, whoever wants the layer waits.
        asked: set when somebody wants the layer.
    """

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.open, self.asked = threading.Event(), threading.Event()
        tar = io.BytesIO()
        with tarfile.open(fileobj=tar, mode="w") as archive:
            for name in ("bin", "etc", "thing"):
                entry = tarfile.TarInfo(name)
                entry.mode = 0o755
                entry.type = tarfile.REGTYPE if name == "thing" else tarfile.DIRTYPE
                archive.addfile(entry, io.BytesIO())
        layer = tar.getvalue()
        self.layer = digest(layer)
        config = json.dumps(
            {
                "architecture": "amd64",
                "os": "linux",
                "config": {},
                "rootfs": {"type": "layers", "diff_ids": [self.layer]},
            }
        ).encode()
        kind = "application/vnd.oci.image"
        manifest = {
            "schemaVersion": 2,
            "mediaType": f"{kind}.manifest.v1+json",
            "config": described(f"{kind}.config.v1+json", config),
            "layers": [described(f"{kind}.layer.v1.tar", layer)],
        }
        self.manifest = json.dumps(manifest).encode()
        self.blobs = {self.layer: layer, digest(config): config}

    @property
    def name(self) -> str:
        return f"127.0.0.1:{self.server_port}"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def described(kind: str, content: bytes) -> dict[str, Any]:
    return {"mediaType": kind, "size": len(content), "digest": digest(content)}


class Answers(BaseHTTPRequestHandler):
    server: Registry

    def do_GET(self) -> None:
        _, _, what = self.path.partition("/v2/")
        place, _, name = what.rpartition("/")
        known = name in ("1", digest(self.server.manifest))
        if place == "things/blobs" and name in self.server.blobs:
            if name == self.server.layer:
                self.server.asked.set()
                self.server.open.wait(60)
            self.answer(200, "application/octet-stream", self.server.blobs[name])
        elif place == "things/manifests" and known:
            kind = "application/vnd.oci.image.manifest.v1+json"
            self.answer(200, kind, self.server.manifest)
        elif not what:
            self.answer(200, "application/json", b"{}")
        else:
            self.answer(404, "application/json", b'{"errors": [{"code": "MANIFEST_UNKNOWN"}]}')

    do_HEAD = do_GET  # noqa: N815

    def answer(self, code: int, kind: str, content: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Docker-Content-Digest", digest(content))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: Any) -> None:
        """Nobody reads it."""


@pytest.fixture
def registry(apptainer: Path) -> Iterator[Registry]:
    with Registry() as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.open.set()
        server.shutdown()


def test_a_fetch_that_is_killed_leaves_no_image(hpcml: Hpcml, registry: Registry) -> None:
    images = hpcml.folder / "images"
    here = site(hpcml, images)
    words = ("container", "pull", f"docker://{registry.name}/things:1", "--site", here)
    first = hpcml.start(*words)
    assert registry.asked.wait(60)
    # Two do not make the same image at once.
    said = hpcml(*words, code=1).stderr
    assert "things_1.sif: it is being made already by process" in said
    first.send_signal(signal.SIGKILL)
    first.communicate()
    wait_until(lambda: not of_folder(hpcml.folder, "hpcml.worker"), what="the end of the job")
    assert [name for name in left_in(images) if not name.startswith(".")] == []
    assert json.loads(hpcml("container", "list", "--site", here, "--json").stdout)["others"] == []
    registry.open.set()
    fetched = hpcml(*words)
    assert fetched.stdout == f"{images / 'things_1.sif'}\n"
    assert left_in(images) == ["things_1.sif"]
    inspected = subprocess.run(
        ["apptainer", "inspect", images / "things_1.sif"], capture_output=True, text=True
    )
    assert f"{registry.name}/things:1" in inspected.stdout


def test_a_fetch_that_fails_says_why(hpcml: Hpcml, registry: Registry) -> None:
    images = hpcml.folder / "images"
    reference = f"docker://{registry.name}/things:2"
    found = hpcml("container", "pull", reference, "--site", site(hpcml, images), code=1)
    assert "MANIFEST_UNKNOWN" in found.stderr.upper().replace(" ", "_")
    assert f"{images / 'things_2.sif'} was not made" in found.stderr
    assert left_in(images) == []


def test_ctrl_c_ends_a_fetch_on_this_machine(hpcml: Hpcml, registry: Registry) -> None:
    """The worker asks the job to leave, which ends Apptainer and clears away what it has."""
    images = hpcml.folder / "images"
    reference = f"docker://{registry.name}/things:1"
    process = hpcml.start("container", "pull", reference, "--site", site(hpcml, images))
    assert registry.asked.wait(60)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130, said
    assert left_in(images) == []


# --- as jobs


def test_images_are_built_and_checked_by_jobs_of_a_cluster(
    hpcml: Hpcml, apptainer: Path, slurm_cluster: SlurmCluster
) -> None:
    images = hpcml.folder / "images"
    partition = {"name": "gpu", "cpus": 64, "memory": "250G", "gpus": 8}
    here = site(hpcml, images, scheduler="slurm", python=sys.executable, partitions=[partition])
    built = hpcml("container", "build", "base", "--site", here, "--base", apptainer, timeout=120)
    assert "submitted as" in built.stderr
    assert "Running post scriptlet" in built.stderr
    assert left_in(images) == [FILE]
    seen = hpcml("container", "check", "base", "--site", here, "--gpus", "2", timeout=120).stdout
    assert f"{images / FILE} on n" in seen
    assert "ok       command" in seen
    # One that waits is taken out of the queue when nobody waits for it any more.
    waiting = hpcml.start(
        "container", "check", "base", "--site", here, "--set", "slurm.begin=now+1hour"
    )
    wait_until(lambda: slurm_cluster.squeue("--name=container_check"), what="the job")
    waiting.terminate()
    _, said = waiting.communicate(timeout=60)
    assert waiting.returncode == 130, said
    left = {path.name for path in (hpcml.folder / "runs").iterdir()}
    assert left - {".hpcml-runs"} == {"container_build"}
    assert slurm_cluster.squeue("--name=container_check") == []
