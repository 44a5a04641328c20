"""Reading what Slurm prints of a cluster."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcml.site.cluster import (
    Gpus,
    associations,
    fields,
    gpus,
    nodes,
    partitions,
    qos_limits,
    settings,
    smallest,
)

PARTITION = (
    "PartitionName=gpu AllowGroups=ml,staff AllowAccounts=ALL AllowQos=high,low AllocNodes=ALL "
    "Default=YES QoS=N/A DefaultTime=00:10:00 DisableRootJobs=NO ExclusiveUser=NO GraceTime=0 "
    "Hidden=NO MaxNodes=4 MaxTime=7-00:00:00 MinNodes=0 LLN=NO MaxCPUsPerNode=48 "
    "Nodes=g[001-016] PriorityJobFactor=1 PriorityTier=10 RootOnly=NO ReqResv=NO "
    "OverSubscribe=EXCLUSIVE OverTimeLimit=NONE PreemptMode=REQUEUE State=UP TotalCPUs=1024 "
    "TotalNodes=16 SelectTypeParameters=NONE JobDefaults=DefCpuPerGPU=8 DefMemPerCPU=4000 "
    "MaxMemPerNode=380000 TRES=cpu=1024,mem=8000G,node=16,billing=1024,gres/gpu=64"
)
FREE = (
    "PartitionName=cpu AllowGroups=ALL DenyAccounts=guests AllowQos=ALL Default=NO "
    "MaxNodes=UNLIMITED MaxTime=UNLIMITED MaxCPUsPerNode=UNLIMITED Nodes=c1 RootOnly=YES "
    "OverSubscribe=NO PreemptMode=OFF State=DRAIN TotalNodes=1 MaxMemPerNode=UNLIMITED"
)
NODE = (
    "NodeName=g001 Arch=x86_64 CoresPerSocket=32 CPUAlloc=64 CPUEfctv=126 CPUTot=128 "
    "CPULoad=3.72 AvailableFeatures=h100,ib ActiveFeatures=h100,ib Gres=gpu:h100:8(S:0-1) "
    "NodeAddr=g001 NodeHostName=g001 Version=23.11.4 OS=Linux 5.14.0-427.el9.x86_64 #1 SMP "
    "PREEMPT_DYNAMIC Fri Mar 1 10:00:00 UTC 2024 RealMemory=1031000 AllocMem=0 FreeMem=19715 "
    "Sockets=2 Boards=1 MemSpecLimit=7000 State={state} ThreadsPerCore=2 TmpDisk=0 Weight=1 "
    "Owner=N/A MCS_label=N/A Partitions=gpu,all BootTime=2024-11-30T18:25:42 "
    "CfgTRES=cpu=126,mem=1031000M,billing=126,gres/gpu=8 AllocTRES= CapWatts=n/a "
    "Reason=bad disk, State=IDLE soon [root@2024-11-30T18:25:42]"
)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpu:h100:8(S:0-1)", [("h100", 8)]),
        ("gpu:a100:4,gpu:v100:2", [("a100", 4), ("v100", 2)]),
        ("gpu:a100:4(S:0,1),gpu:v100:2(S:1),nvme:1", [("a100", 4), ("v100", 2)]),
        ("gpu:4", [(None, 4)]),
        ("gpu", [(None, 1)]),
        ("gpu:tesla", [("tesla", 1)]),
        ("gpu:1g.10gb:7,gpu:1g.10gb:7", [("1g.10gb", 14)]),
        ("gpu:no_consume:2", [(None, 2)]),
        ("gpu:h100:0", []),
        ("craynetwork:4,bandwidth:lustre:no_consume:4G,shard:gpu:8,mps:400", []),
        ("(null)", []),
        ("", []),
    ],
)
def test_gpus(text: str, found: list[tuple[str | None, int]]) -> None:
    assert gpus(text) == tuple(Gpus(*each) for each in found)


KIND = st.none() | st.from_regex(r"[a-z][a-z0-9_.]{0,8}", fullmatch=True).filter(
    lambda kind: kind != "no_consume"
)


@given(
    st.lists(
        st.tuples(KIND, st.integers(1, 16)), min_size=1, max_size=5, unique_by=lambda each: each[0]
    ),
    st.sampled_from(["", "(S:0)", "(S:0-1)", "(S:0,1)", "(IDX:0-3,5)"]),
)
def test_any_gpus(given_gpus: list[tuple[str | None, int]], where: str) -> None:
    text = ",".join(
        f"gpu:{kind}:{count}{where}" if kind else f"gpu:{count}{where}"
        for kind, count in given_gpus
    )
    assert gpus(f"nvme:1,{text}") == tuple(Gpus(*each) for each in given_gpus)


def test_a_partition_with_limits() -> None:
    (found,) = partitions(PARTITION + "\n")
    assert found.name == "gpu"
    assert found.default
    assert found.max_time == 7 * 86400
    assert (found.max_nodes, found.nodes) == (4, 16)
    assert (found.max_cpus, found.max_memory) == (48, 380000)
    assert found.groups == {"ml", "staff"}
    assert found.qos == {"high", "low"}
    assert found.accounts is None
    assert found.whole_nodes
    assert found.preempted == "REQUEUE"


def test_a_partition_without_limits() -> None:
    (found,) = partitions(FREE)
    assert (found.max_time, found.max_nodes, found.max_cpus, found.max_memory) == (None,) * 4
    assert found.groups is None
    assert found.not_accounts == {"guests"}
    assert found.root_only
    assert found.state == "DRAIN"
    assert not found.default
    assert found.preempted is None


@pytest.mark.parametrize(
    ("state", "usable"),
    [
        ("IDLE", True),
        ("MIXED", True),
        ("ALLOCATED+PLANNED", True),
        ("IDLE+CLOUD+POWERED_DOWN", True),
        ("MIXED+RESERVED", True),
        ("IDLE+DRAIN", False),
        ("MIXED+DRAIN", False),
        ("DOWN*", False),
        ("IDLE*", False),
        ("DOWN+NOT_RESPONDING", False),
        ("FUTURE", False),
        ("IDLE+FAIL", False),
    ],
)
def test_a_node(state: str, usable: bool) -> None:
    (found,) = nodes(NODE.format(state=state))
    assert found.name == "g001"
    assert found.cpus == 126
    assert found.memory == 1024000
    assert found.gpus == (Gpus("h100", 8),)
    assert found.partitions == {"gpu", "all"}
    assert found.usable == usable


def test_values_with_spaces_and_equal_signs() -> None:
    found = fields(NODE.format(state="IDLE"))
    assert found["OS"].endswith("UTC 2024")
    assert found["CfgTRES"] == "cpu=126,mem=1031000M,billing=126,gres/gpu=8"
    assert found["AllocTRES"] == ""
    assert found["State"] == "IDLE"


@given(st.text())
def test_no_text_is_too_odd(text: str) -> None:
    fields(text)
    settings(text)
    gpus(text)
    nodes(text)
    partitions(text)
    associations(text)
    qos_limits(text)


def test_settings() -> None:
    found = settings(
        "Configuration data as of 2026-11-30T19:38:45\n"
        "ClusterName             = hpc1\n"
        "MaxArraySize            = 4001\n"
        "MpiParams               = (null)\n"
        "SlurmctldHost[0]        = head(10.0.0.1)\n"
        "PowerPlugin             = \n"
        "AuthInfo                = socket=/run/x,cred_expire=5\n"
        "\nSlurmctld(primary) at head is UP\n"
    )
    assert found["ClusterName"] == "hpc1"
    assert found["MaxArraySize"] == "4001"
    assert found["AuthInfo"] == "socket=/run/x,cred_expire=5"
    assert "MpiParams" not in found


def test_the_smallest_node() -> None:
    text = NODE.format(state="IDLE")
    other = text.replace("CPUEfctv=126", "CPUEfctv=64").replace("gpu:h100:8", "gpu:h100:4")
    assert smallest(nodes(f"{text}\n{other}")) == (64, 1024000, (Gpus("h100", 4),))
    mixed = text.replace("gpu:h100:8", "gpu:a100:4,gpu:v100:2")
    assert smallest(nodes(f"{text}\n{mixed}"))[2] == (Gpus(None, 6),)
    without = text.replace("gpu:h100:8(S:0-1)", "(null)")
    assert smallest(nodes(f"{text}\n{without}"))[2] == ()


def test_accounts_and_limits() -> None:
    found = associations("ml||10|100|1-00:00:00|||normal,high\nml|debug||||gres/gpu=2||normal\n|\n")
    assert [(each.account, each.partition) for each in found] == [("ml", ""), ("ml", "debug")]
    assert found[0].limits == {"MaxJobs": "10", "MaxSubmit": "100", "MaxWall": "1-00:00:00"}
    assert found[0].qos == ("normal", "high")
    assert qos_limits("high|4|||gres/gpu=8|\nnormal|||||\n") == {
        "high": {"MaxJobsPU": "4", "MaxTRESPU": "gres/gpu=8"},
        "normal": {},
    }
