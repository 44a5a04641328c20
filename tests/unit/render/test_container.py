"""The words that start an image: every path arrives as it is, and no secret is among them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.errors import UserError
from hpcml.plan import Plan, compile_plan
from hpcml.plan.container import Container
from hpcml.recipe.container import Bind, parse_bind
from hpcml.recipe.load import load_recipe
from hpcml.render import container as render
from hpcml.site.search import load_site

NO_CONTROL = st.characters(exclude_categories=["Cc", "Cs"])
PATHS = st.text(NO_CONTROL, min_size=1, max_size=30).map(lambda name: f"/{name}")


def container(*binds: Bind, runtime: str = "apptainer") -> Container:
    return Container(runtime, "/x.sif", "python3", binds, {}, None, (), ())


def as_apptainer_reads(words: list[str]) -> Bind:
    """What Apptainer's own readers of --bind and --mount make of the words."""
    option, value = words
    if option == "--bind":
        source, *rest = value.split(":")
        assert "," not in value
        return Bind(source, rest[0] if rest else source, rest[1:] == ["ro"])
    (fields,) = csv.reader([value], strict=True)
    pairs = dict(field.split("=", 1) for field in fields if "=" in field)
    assert pairs.pop("type") == "bind"
    return Bind(pairs["source"], pairs["destination"], "ro" in fields)


@given(PATHS, PATHS, st.booleans())
def test_any_path_can_be_bound(source: str, destination: str, read_only: bool) -> None:
    bind = Bind(source, destination, read_only)
    lines = render.command(container(bind), Path("/run"), Path("/code"))
    (words,) = [line for line in lines if line[0] in ("--bind", "--mount")]
    assert as_apptainer_reads(list(words)) == bind


@given(PATHS, PATHS, st.sampled_from(["", ":ro", ":rw"]))
def test_a_written_bind_is_read_again(source: str, destination: str, mode: str) -> None:
    def escaped(path: str) -> str:
        return path.replace(":", "\\:")

    if source.endswith("\\") or destination.endswith("\\") or "\\:" in source + destination:
        return  # a backslash before a colon cannot be written
    text = f"{escaped(source)}:{escaped(destination)}{mode}"
    assert parse_bind(text) == Bind(source, destination, mode == ":ro")


@pytest.mark.parametrize("text", ["", "data", "/a:b", "/a:/b:rx", "/a:/b:ro:x", "/a\nb", ":/a"])
def test_what_is_no_bind_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        parse_bind(text)


# --- from a recipe and a site


def plan(
    folder: Path, image: str, site: str, binds: str = "[]", runs: str = "/srv/runs", more: str = ""
) -> Plan:
    (folder / "recipe.yaml").write_text(
        f"name: x\nkind: command\n{more}\ncommand: {{run: [anything]}}\n"
        f"container:\n  image: '{image}'\n  binds: {binds}\n"
    )
    (folder / "site.yaml").write_text(f"name: here\n{site}\n")
    found = load_site(folder / "site.yaml")
    return compile_plan(load_recipe(folder / "recipe.yaml"), found, Path(runs))


APPTAINER = "scheduler: slurm\ncontainer: {runtime: apptainer}"
PYXIS = "scheduler: slurm\ncontainer: {runtime: pyxis}"


@pytest.mark.parametrize(
    ("image", "site", "said"),
    [
        ("/no/such.sif", APPTAINER, "recipe.yaml:6: container.image: there is no image /no/such"),
        ("x.sif", APPTAINER, "recipe.yaml:6: container.image: x.sif is a relative path"),
        ("s3://x/y", APPTAINER, "not s3://"),
        ("/x.sif", "scheduler: slurm", "recipe.yaml:5: container: site here has no container"),
        ("/x.sif", PYXIS, "not a .sif file"),
        ("oras://x/y", PYXIS, "not oras://"),
        ("/x.sqsh", PYXIS, "there is no image /x.sqsh"),
        ("two words", PYXIS, "is not registry/name:tag"),
        ("x-{{ params.n }}", PYXIS, "all cells have the same image"),
        ("/x.sif", PYXIS.replace("slurm", "local"), "site.yaml:3: container.runtime: pyxis is a"),
    ],
)
def test_what_cannot_run_is_refused_before(
    tmp_path: Path, image: str, site: str, said: str
) -> None:
    with pytest.raises(UserError) as caught:
        plan(tmp_path, image, site)
    assert said in str(caught.value)


@pytest.mark.parametrize("path", ["/a,b", "/a\\:b", "/a b", "/a#b", "/$HOME"])
def test_pyxis_refuses_what_it_cannot_quote(tmp_path: Path, path: str) -> None:
    with pytest.raises(UserError, match="pyxis cannot mount"):
        plan(tmp_path, "ubuntu:24.04", PYXIS, binds=f"['{path}']")
    with pytest.raises(UserError, match="pyxis cannot mount"):
        plan(tmp_path, "ubuntu:24.04", PYXIS, runs="/srv/my runs")


@pytest.mark.parametrize(
    ("image", "rendered"),
    [
        ("docker://nvcr.io/nvidia/pytorch:25.06-py3", "nvcr.io#nvidia/pytorch:25.06-py3"),
        ("nvcr.io/nvidia/pytorch:25.06-py3", "nvcr.io#nvidia/pytorch:25.06-py3"),
        ("nvcr.io#nvidia/pytorch:25.06-py3", "nvcr.io#nvidia/pytorch:25.06-py3"),
        ("localhost:5000/a/b", "localhost:5000#a/b"),
        ("ubuntu:24.04", "ubuntu:24.04"),
        ("docker://vllm/vllm-openai:v0.11.0", "vllm/vllm-openai:v0.11.0"),
    ],
)
def test_references_for_pyxis(tmp_path: Path, image: str, rendered: str) -> None:
    found = plan(tmp_path, image, PYXIS).container
    assert found is not None
    assert found.image == rendered


def test_relative_names_lie_in_the_folder_of_images(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "x.sif").touch()
    site = f"scheduler: slurm\ncontainer: {{runtime: apptainer, images: {tmp_path}/images}}"
    found = plan(tmp_path, "x.sif", site).container
    assert found is not None
    assert found.image == f"{tmp_path}/images/x.sif"
    for image, hint in (
        ("y.sif", "y.sif; a relative path begins in the site's folder of images"),
        ("nvcr.io/x/y:1", "to take it from a registry, write docker://nvcr.io/x/y:1"),
        ("torhc", "torhc, and hpcml has no image of this name; did you mean 'torch'?"),
    ):
        with pytest.raises(UserError, match="there is no image") as error:
            plan(tmp_path, image, site)
        assert hint in str(error.value)


@pytest.mark.parametrize(("runtime", "end"), [("apptainer", "sif"), ("pyxis", "sqsh")])
def test_short_names_are_files_of_images_that_are_pinned(
    tmp_path: Path, runtime: str, end: str
) -> None:
    site = f"scheduler: slurm\ncontainer: {{runtime: {runtime}, images: {tmp_path}/images}}"
    with pytest.raises(UserError, match=rf"6: container.image: .*/torch-2.9.0-1.{end}; make it: "):
        plan(tmp_path, "torch", site)
    with pytest.raises(UserError, match="the site has no folder where it could be"):
        plan(tmp_path, "torch", f"scheduler: slurm\ncontainer: {{runtime: {runtime}}}")
    (tmp_path / "images").mkdir()
    # Of another definition.
    (tmp_path / "images" / f"torch-2.8.0-1.{end}").touch()
    with pytest.raises(UserError, match="make it: "):
        plan(tmp_path, "torch", site)
    file = tmp_path / "images" / f"torch-2.9.0-1.{end}"
    file.touch()
    found = plan(tmp_path, "torch", site).container
    assert found is not None
    assert found.image == str(file)
    # Somebody's own sandbox folder of this name goes before.
    (tmp_path / "images" / "torch").mkdir()
    found = plan(tmp_path, "torch", site).container
    assert found is not None
    assert found.image == str(tmp_path / "images" / "torch")


def test_a_recipe_wins_over_its_site_and_the_runs_root_over_both(tmp_path: Path) -> None:
    site = (
        "scheduler: slurm\ncontainer: {runtime: apptainer, env: {A: s, B: s},\n"
        "  binds: ['/data:/x', '/srv']}"
    )
    found = plan(tmp_path, "docker://x", site, binds="['/mine:/x:ro', '/other:/srv/runs']")
    assert found.container is not None
    assert found.container.binds == (
        Bind("/mine", "/x", True),
        Bind("/srv", "/srv"),
        Bind("/srv/runs", "/srv/runs"),
    )


def test_gpus_only_for_jobs_that_have_some(tmp_path: Path) -> None:
    site = APPTAINER.replace("apptainer", "apptainer, gpu: rocm")
    for more, gpu in (("", None), ("resources: {gpus: 1}", "rocm")):
        found = plan(tmp_path, "docker://x", site, more=more).container
        assert found is not None
        assert found.gpu == gpu
