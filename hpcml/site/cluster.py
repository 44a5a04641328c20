"""Reading what Slurm says of a cluster: its configuration, its partitions, nodes and limits.

Only the fixed ``-o`` and ``-P`` forms are read, whose names have stayed the same since Slurm 20.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from hpcml.recipe.units import parse_duration

# A value may have spaces (`OS=Linux 6.1 #1 SMP`), and ends where the next key begins.
_FIELD = re.compile(r"(?:^|(?<=\s))([A-Z]\w*)=")
_SETTING = re.compile(r"(\w+(?:\[\d+\])?)\s*= ?(.*)")
_STATE = re.compile(r"[A-Z_]+")

# States and flags of nodes that no job will get today.
_GONE = frozenset(
    (
        "DOWN",
        "DRAIN",
        "DRAINED",
        "DRAINING",
        "ERROR",
        "FAIL",
        "FAILING",
        "FUTURE",
        "INVALID_REG",
        "NOT_RESPONDING",
        "UNKNOWN",
    )
)


class Gpus(NamedTuple):
    """GPUs of one kind in a node; ``kind`` is None where Slurm was not told one."""

    kind: str | None
    number: int


class Node(NamedTuple):
    """A node: cores and megabytes that jobs can have, its GPUs, and where it belongs."""

    name: str
    cpus: int
    memory: int
    gpus: tuple[Gpus, ...]
    usable: bool
    partitions: frozenset[str]


class PartitionInfo(NamedTuple):
    """A partition as ``scontrol`` shows it. None is no limit; ``max_memory`` is in megabytes.

    ``groups``, ``accounts`` and ``qos`` are those that may use it, or None if all may;
    ``not_accounts`` are those that may not.
    """

    name: str
    state: str
    default: bool
    max_time: int | None
    max_nodes: int | None
    nodes: int
    max_cpus: int | None
    max_memory: int | None
    groups: frozenset[str] | None
    accounts: frozenset[str] | None
    not_accounts: frozenset[str]
    qos: frozenset[str] | None
    root_only: bool
    whole_nodes: bool
    preempted: str | None


class Association(NamedTuple):
    """One account of the user, with its limits as ``sacctmgr`` prints them."""

    account: str
    partition: str
    limits: dict[str, str]
    qos: tuple[str, ...]


def fields(line: str) -> dict[str, str]:
    """The ``Key=value`` pairs of one line of ``scontrol show … -o``; the first of a key counts."""
    found: dict[str, str] = {}
    matches = list(_FIELD.finditer(line))
    ends = [match.start() for match in matches[1:]] + [len(line)]
    for match, end in zip(matches, ends, strict=False):
        found.setdefault(match[1], line[match.end() : end].strip())
    return found


def settings(text: str) -> dict[str, str]:
    """``scontrol show config`` by the names of the settings; ``(null)`` is left out."""
    found: dict[str, str] = {}
    for line in text.splitlines():
        match = _SETTING.fullmatch(line.strip())
        if match and match[2] not in ("(null)", "N/A"):
            found.setdefault(match[1], match[2])
    return found


def gpus(text: str) -> tuple[Gpus, ...]:
    """The GPUs of a GRES text such as ``gpu:h100:8(S:0-1)`` or ``gpu:a100:4,gpu:v100:2,nvme:1``."""
    found: dict[str | None, int] = {}
    for entry in re.sub(r"\([^)]*\)", "", text).split(","):
        name, *rest = [part for part in entry.strip().split(":") if part != "no_consume"]
        if name != "gpu":
            continue
        count = int(rest.pop()) if rest and rest[-1].isdecimal() else 1
        kind = rest[0] if rest else None
        found[kind] = found.get(kind, 0) + count
    return tuple(Gpus(kind, count) for kind, count in found.items() if count)


def nodes(text: str) -> list[Node]:
    """``scontrol show node -o``."""
    found = []
    for entry in _entries(text, "NodeName"):
        cpus = _number(entry.get("CPUEfctv")) or _number(entry.get("CPUTot")) or 1
        memory = _number(entry.get("RealMemory")) or 0
        state = entry.get("State", "UNKNOWN")
        found.append(
            Node(
                name=entry["NodeName"],
                cpus=cpus,
                memory=max(memory - (_number(entry.get("MemSpecLimit")) or 0), 0),
                gpus=gpus(entry.get("Gres", "")),
                # "DOWN*" and "IDLE*" do not respond.
                usable="*" not in state and not _GONE.intersection(_STATE.findall(state)),
                partitions=frozenset(filter(None, entry.get("Partitions", "").split(","))),
            )
        )
    return found


def partitions(text: str) -> list[PartitionInfo]:
    """``scontrol show partition -o``, in Slurm's order."""
    found = []
    for entry in _entries(text, "PartitionName"):
        mode = entry.get("PreemptMode", "OFF")
        found.append(
            PartitionInfo(
                name=entry["PartitionName"],
                state=entry.get("State", "UP"),
                default=entry.get("Default") == "YES",
                max_time=_time(entry.get("MaxTime")),
                max_nodes=_number(entry.get("MaxNodes")),
                nodes=_number(entry.get("TotalNodes")) or 0,
                max_cpus=_number(entry.get("MaxCPUsPerNode")),
                max_memory=_number(entry.get("MaxMemPerNode")),
                groups=_names(entry.get("AllowGroups")),
                accounts=_names(entry.get("AllowAccounts")),
                not_accounts=_names(entry.get("DenyAccounts")) or frozenset(),
                qos=_names(entry.get("AllowQos")),
                root_only=entry.get("RootOnly") == "YES",
                whole_nodes=entry.get("OverSubscribe", "").startswith("EXCLUSIVE"),
                preempted=None if mode in ("OFF", "GANG", "GANG,SUSPEND") else mode,
            )
        )
    return found


ASSOCIATION = ("Account", "Partition", "MaxJobs", "MaxSubmit", "MaxWall", "MaxTRES", "GrpTRES")
"""Columns of ``sacctmgr show assoc``, before that of the QOS."""


def associations(text: str) -> list[Association]:
    """``sacctmgr --noheader --parsable2 show assoc`` with the columns `ASSOCIATION` and QOS."""
    found = []
    for line in text.splitlines():
        values = line.split("|")
        if len(values) != len(ASSOCIATION) + 1 or not values[0]:
            continue
        named = dict(zip(ASSOCIATION, values[:-1], strict=True))
        limits = {name: value for name, value in list(named.items())[2:] if value}
        qos = tuple(filter(None, values[-1].split(",")))
        found.append(Association(values[0], values[1], limits, qos))
    return found


QOS = ("Name", "MaxJobsPU", "MaxSubmitPU", "MaxWall", "MaxTRESPU", "GrpTRES")
"""Columns of ``sacctmgr show qos``."""


def qos_limits(text: str) -> dict[str, dict[str, str]]:
    """``sacctmgr --noheader --parsable2 show qos`` with the columns `QOS`: limits by name."""
    found = {}
    for line in text.splitlines():
        values = line.split("|")
        if len(values) == len(QOS) and values[0]:
            named = dict(zip(QOS, values, strict=True))
            found[values[0]] = {name: value for name, value in list(named.items())[1:] if value}
    return found


def _entries(text: str, first: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        entry = fields(line)
        if entry.get(first):
            yield entry


def _number(text: str | None) -> int | None:
    return int(text) if text and text.isdecimal() else None


def _time(text: str | None) -> int | None:
    try:
        return parse_duration(text or "") or None
    except ValueError:  # UNLIMITED, NONE, INFINITE
        return None


def _names(text: str | None) -> frozenset[str] | None:
    if text in (None, "", "ALL", "N/A", "(null)"):
        return None
    assert text is not None
    return frozenset(text.split(","))


def smallest(found: Iterable[Node]) -> tuple[int, int, tuple[Gpus, ...]]:
    """What every one of the nodes has: cores, megabytes, and GPUs.

    GPUs are counted over all kinds where the nodes differ in kind, since a job that names no kind
    may get any of them.
    """
    found = list(found)
    cpus = min((node.cpus for node in found), default=1)
    memory = min((node.memory for node in found), default=0)
    kinds = {node.gpus for node in found}
    if len(kinds) == 1:
        return cpus, memory, kinds.pop()
    count = min((sum(each.number for each in node.gpus) for node in found), default=0)
    names = {each.kind for node in found for each in node.gpus}
    if not count:
        return cpus, memory, ()
    return cpus, memory, (Gpus(names.pop() if len(names) == 1 else None, count),)
