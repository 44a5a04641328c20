"""Which site file is used, and what a wrong one says."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from hpcml.errors import UserError
from hpcml.site.search import find_site, load_site, site_files


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("HPCML_SITE", raising=False)
    return tmp_path


def write(folder: Path, name: str, text: str = "") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.yaml"
    path.write_text(f"name: {name}\nscheduler: local\n{text}")
    return path


def test_local_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "a-host-of-no-site")
    assert find_site().site.name == "local"


def test_a_name_a_path_and_the_environment(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(place / "elsewhere", "box")
    write(place / "site_configs", "mine")
    assert find_site("mine").site.name == "mine"
    assert find_site(str(path)).site.name == "box"
    monkeypatch.setenv("HPCML_SITE", "mine")
    assert find_site().site.name == "mine"
    assert find_site("local").site.name == "local"
    monkeypatch.setenv("HPCML_SITE", "mien")
    with pytest.raises(UserError, match=r"^\$HPCML_SITE=mien: no such site; did you mean 'mine'"):
        find_site()


def test_the_host_name_chooses(place: Path) -> None:
    write(place / "site_configs", "other", "match: no-such-host\n")
    write(place / "site_configs", "this", f"match: {socket.gethostname()}\n")
    assert find_site().site.name == "this"


def test_the_project_hides_the_user_and_the_user_hides_hpcml(place: Path) -> None:
    write(place / "config" / "hpcml" / "sites", "local", "description: the user's\n")
    assert find_site("local").site.description == "the user's"
    write(place / "site_configs", "local", "description: the project's\n")
    assert find_site("local").site.description == "the project's"
    assert site_files()["local"].parent.name == "site_configs"


def test_an_unknown_site_names_the_nearest() -> None:
    with pytest.raises(UserError, match="did you mean 'local'"):
        find_site("locl")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("schedule: slurm\n", ["box.yaml:3", "schedule", "scheduler"]),
        ("match: '['\n", ["box.yaml:3", "match", "regular expression"]),
        ("template: nowhere.j2\n", ["box.yaml:3", "template", "nowhere.j2"]),
        ("signal: {name: KILL}\n", ["box.yaml:3", "signal.name", "USR1"]),
        ("signal: {lead: soon}\n", ["box.yaml:3", "signal.lead", "1h30m"]),
        ("env: {A-B: x}\n", ["box.yaml:3", "env", "A-B"]),
        ("machine: {cpus: 0}\n", ["box.yaml:3", "machine.cpus", "at least 1"]),
        ("setup: module load\n", ["box.yaml:3", "setup", "a list"]),
    ],
)
def test_a_wrong_site_says_where_and_what(place: Path, text: str, said: list[str]) -> None:
    path = write(place, "box", text)
    with pytest.raises(UserError) as error:
        load_site(path)
    assert all(part in str(error.value) for part in said), str(error.value)


def test_a_template_that_cannot_be_looked_at(place: Path) -> None:
    path = write(place / "site_configs", "mine", f"template: {'x' * 300}\n")
    with pytest.raises(UserError, match=r"mine.yaml:3: template: .*too long"):
        load_site(path)


@pytest.mark.parametrize("scheduler", ["local", "slurm", "volcano"])
@pytest.mark.parametrize(
    ("key", "block", "of"),
    [
        ("machine", "{cpus: 2}", "local"),
        ("slurm", "{links: 3}", "slurm"),
        ("volcano", "{queue: q}", "volcano"),
    ],
)
def test_keys_of_another_scheduler_are_refused(
    place: Path, scheduler: str, key: str, block: str, of: str
) -> None:
    path = place / "mixed.yaml"
    path.write_text(f"name: mixed\nscheduler: {scheduler}\npython: python3\n{key}: {block}\n")
    if scheduler == of:
        assert load_site(path).site.scheduler == scheduler
        return
    with pytest.raises(UserError, match=f"mixed.yaml:4: {key}: the scheduler is {scheduler}"):
        load_site(path)
