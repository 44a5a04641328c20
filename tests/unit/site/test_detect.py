"""The site file that is written for a cluster."""

from __future__ import annotations

import re
import socket
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from hpcml.recipe.units import parse_memory
from hpcml.site.detect import Answers, site_file
from hpcml.site.schema import Site
from hpcml.site.search import load_site

CONFIG = """\
Configuration data as of 2026-11-30T19:38:45
AccountingStorageEnforce = associations,limits,qos
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = hpc1
MaxArraySize            = 4001
SLURM_VERSION           = 23.11.4
"""


def partition(name: str, **keys: str) -> str:
    found = {
        "AllowGroups": "ALL",
        "AllowAccounts": "ALL",
        "AllowQos": "ALL",
        "Default": "NO",
        "MaxNodes": "UNLIMITED",
        "MaxTime": "UNLIMITED",
        "PreemptMode": "OFF",
        "State": "UP",
        "TotalNodes": "2",
        **keys,
    }
    return " ".join([f"PartitionName={name}", *(f"{key}={value}" for key, value in found.items())])


def node(name: str, partitions: str, gres: str = "(null)", **keys: str) -> str:
    found = {
        "CPUTot": "64",
        "Gres": gres,
        "OS": "Linux 5.14.0 #1 SMP",
        "RealMemory": "256000",
        "State": "IDLE",
        "Partitions": partitions,
        **keys,
    }
    return " ".join([f"NodeName={name}", *(f"{key}={value}" for key, value in found.items())])


ANSWERS = Answers(
    config=CONFIG,
    partitions="\n".join(
        [
            partition("debug", MaxTime="00:15:00", MaxNodes="2"),
            partition("gpu", Default="YES", MaxTime="7-00:00:00"),
            partition("old", State="INACTIVE"),
            partition("physics", AllowGroups="phys"),
            partition("theirs", AllowAccounts="bio"),
            partition("broken"),
        ]
    ),
    nodes="\n".join(
        [
            node("g1", "gpu,debug,physics,theirs,old", "gpu:h100:8(S:0-1)"),
            node("g2", "gpu,physics", "gpu:h100:4(S:0-1)", CPUTot="96", State="MIXED"),
            node("g3", "gpu", "gpu:h100:8(S:0-1)", CPUTot="8", State="IDLE+DRAIN"),
            node("b1", "broken", State="DOWN*"),
        ]
    ),
    associations="ml||10|100|1-00:00:00|||normal,high\n",
    qos="normal|||||\nhigh|4||||\n",
    sacct=True,
    host="login03.hpc1.example.org",
    groups=frozenset(["users", "ml"]),
    runs=("$SCRATCH/hpcml-runs", "$SCRATCH is /scratch/me here."),
    runtimes=("apptainer",),
)


def loaded(text: str, folder: Path) -> Site:
    path = folder / "site.yaml"
    path.write_text(text, encoding="utf-8")
    return load_site(path).site


def test_what_slurm_says_is_in_the_file(tmp_path: Path) -> None:
    site = loaded(site_file(ANSWERS), tmp_path)
    assert site.name == "hpc1"
    assert site.scheduler == "slurm"
    assert site.runs == "$SCRATCH/hpcml-runs"
    assert site.slurm.max_array_size == 4001
    assert site.slurm.accounting
    assert site.container is not None
    assert site.container.runtime == "apptainer"
    # The default partition comes first; those that are of no use are left out.
    gpu, debug = site.partitions
    assert (gpu.name, gpu.cpus, gpu.gpus, gpu.gpu_type) == ("gpu", 64, 4, "h100")
    assert gpu.memory == parse_memory("250G")
    assert (gpu.max_nodes, gpu.max_time) == (3, 7 * 86400)
    assert (debug.name, debug.gpus, debug.max_nodes, debug.max_time) == ("debug", 8, 1, 900)


def test_what_a_person_should_know_is_a_comment() -> None:
    text = site_file(ANSWERS)
    for said in (
        "old: its state is INACTIVE",
        "physics: only groups phys",
        "theirs: only accounts bio",
        "broken: all of its nodes are down",
        "1 of 3 nodes are down or drained",
        "1 with 96 CPUs, 250G, 4 GPUs h100",
        "ml: MaxJobs=10 MaxSubmit=100 MaxWall=1-00:00:00",
        "high: MaxJobsPU=4",
    ):
        assert said in text


def test_login_hosts_that_differ_in_their_number_match(tmp_path: Path) -> None:
    site = loaded(site_file(ANSWERS), tmp_path)
    assert site.match is not None
    assert re.fullmatch(site.match, "login12.hpc2.example.org")
    assert not re.fullmatch(site.match, "login12xhpc1.example.org")
    here = loaded(site_file(replace(ANSWERS, host=socket.gethostname())), tmp_path)
    assert re.fullmatch(str(here.match), socket.gethostname())


def test_several_kinds_of_gpus_in_one_node(tmp_path: Path) -> None:
    text = site_file(
        replace(
            ANSWERS,
            partitions=partition("gpu"),
            nodes=node("g1", "gpu", "gpu:a100:4,gpu:v100:2"),
        )
    )
    (gpu,) = loaded(text, tmp_path).partitions
    assert (gpu.gpus, gpu.gpu_type) == (6, None)
    assert "4 GPUs a100 and 2 GPUs v100" in text


def test_nodes_with_and_without_gpus(tmp_path: Path) -> None:
    nodes = "\n".join([node("g1", "all", "gpu:8"), node("c1", "all"), node("c2", "all")])
    text = site_file(replace(ANSWERS, partitions=partition("all"), nodes=nodes))
    (found,) = loaded(text, tmp_path).partitions
    assert found.gpus == 0
    assert "1 with 64 CPUs, 250G, 8 GPUs" in text
    assert "2 with 64 CPUs, 250G, no GPUs" in text


def test_a_cluster_without_accounting_or_partitions(tmp_path: Path) -> None:
    text = site_file(
        replace(
            ANSWERS,
            config=CONFIG.replace("slurmdbd", "none").replace("4001", "0"),
            partitions="",
            nodes="",
            associations=None,
            qos=None,
            sacct=False,
            runtimes=(),
        )
    )
    site = loaded(text, tmp_path)
    assert not site.slurm.accounting
    assert site.partitions == []
    assert site.container is None
    assert "takes no arrays" in text


def test_a_user_without_an_account_is_told() -> None:
    assert "no account" in site_file(replace(ANSWERS, associations=""))


@pytest.mark.parametrize("name", ["true", "null", "123", "1e3", "a b", "über", "x: y", "#1", ""])
def test_names_that_yaml_would_take_for_something_else(name: str, tmp_path: Path) -> None:
    assert loaded(site_file(ANSWERS, name), tmp_path).name == (name or "hpc1")


WORD = st.text(min_size=1).filter(lambda text: not re.search(r"[\s\0\ud800-\udfff]", text))


@given(
    st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), min_size=1),
    WORD.filter(lambda text: "," not in text),
    WORD,
)
@hypothesis_settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_name_arrives_as_it_is(tmp_path: Path, name: str, queue: str, host: str) -> None:
    answers = replace(
        ANSWERS, partitions=partition(queue), nodes=node("g1", queue), host=host, groups=frozenset()
    )
    site = loaded(site_file(answers, name), tmp_path)
    assert site.name == name
    assert [each.name for each in site.partitions] == [queue]
