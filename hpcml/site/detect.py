"""A site file for the cluster that this login node belongs to, from what its Slurm says."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from hpcml.recipe.units import format_duration, format_memory
from hpcml.site.cluster import (
    Association,
    Node,
    PartitionInfo,
    associations,
    nodes,
    partitions,
    qos_limits,
    settings,
    smallest,
)

_PLAIN = re.compile(r"[A-Za-z][\w-]*", re.ASCII)
_WORDS_OF_YAML = ("true", "false", "null")


@dataclass(frozen=True)
class Answers:
    """What was asked on the login node; the texts are as the commands printed them.

    Attributes:
        config, partitions, nodes: ``scontrol show …``.
        associations, qos: ``sacctmgr show …``; None where there is no accounting.
        sacct: whether ``sacct`` answers.
        host: the name of this host.
        groups: the user's groups.
        runs: the proposed runs root, as it is written in the file, and why it.
        runtimes: container runtimes that were found, the preferred one first.
    """

    config: str
    partitions: str
    nodes: str
    associations: str | None
    qos: str | None
    sacct: bool
    host: str
    groups: frozenset[str]
    runs: tuple[str, str]
    runtimes: tuple[str, ...]


def site_file(answers: Answers, name: str | None = None) -> str:
    """The text of the site file.

    Args:
        answers: what Slurm and the login node said.
        name: the site's name; the cluster's without it.
    """
    config = settings(answers.config)
    cluster = config.get("ClusterName", "cluster")
    lines = [
        f"# Found by `hpcml site detect` on {_line(answers.host)}, "
        f"Slurm {_line(config.get('SLURM_VERSION', 'of an unknown version'))}.",
        "# Look through it, then try it: hpcml site check NAME",
        f"name: {_text(name or cluster)}",
        f"description: {_text(f'the cluster {cluster}')}",
        "scheduler: slurm",
        "",
        "# On hosts with such a name this site is used without --site.",
        f"match: {_match(answers.host)}",
        "",
        f"# {answers.runs[1]}",
        "# All nodes must share it, and it should be fast and large.",
        f"runs: {_text(answers.runs[0])}",
        "",
        "# The Python that jobs start; without the key the one that runs hpcml. The nodes need it.",
        "# python: /path/on/every/node/bin/python",
        "# Lines of shell at the start of every job, and variables.",
        "# setup: [module load cuda]",
        '# env: {HF_HUB_OFFLINE: "1"}',
        "",
    ]
    found = associations(answers.associations or "")
    lines += _partition_lines(answers, found)
    lines += ["", *_slurm_lines(answers, config, found)]
    lines += ["", *_container_lines(answers.runtimes)]
    return "\n".join(lines) + "\n"


def _partition_lines(answers: Answers, found: list[Association]) -> Iterator[str]:
    members = nodes(answers.nodes)
    every = sorted(partitions(answers.partitions), key=lambda partition: not partition.default)
    taken, left_out = [], []
    for partition in every:
        own = [node for node in members if partition.name in node.partitions]
        reason = _why_not(partition, own, answers.groups, found)
        if reason:
            left_out.append((partition, own, reason))
        else:
            taken.append((partition, own))
    yield "# A job goes to the first that has what it asks for: put those you prefer first."
    if taken:
        yield "partitions:"
    for partition, own in taken:
        for remark in _remarks(partition, own):
            yield f"  # {_line(remark)}"
        yield f"  {_entry(partition, own)}"
    if left_out:
        yield "# Left out:" if taken else "# No partition can be used now; all are left out:"
    for partition, own, reason in left_out:
        yield f"  # {_line(partition.name)}: {_line(reason)}"
        yield f"  # {_entry(partition, own)}"


def _why_not(
    partition: PartitionInfo, own: list[Node], groups: frozenset[str], found: list[Association]
) -> str | None:
    """Why jobs of this user do not run in a partition, or None if they do."""
    if partition.state != "UP":
        return f"its state is {partition.state}"
    if partition.root_only:
        return "only root may use it"
    if partition.groups is not None and not partition.groups & groups:
        return f"only groups {', '.join(sorted(partition.groups))} may use it (AllowGroups)"
    accounts = {association.account for association in found}
    if accounts and partition.accounts is not None and not partition.accounts & accounts:
        allowed = ", ".join(sorted(partition.accounts))
        return f"only accounts {allowed} may use it (AllowAccounts)"
    if accounts and accounts <= partition.not_accounts:
        return f"accounts {', '.join(sorted(accounts))} may not use it (DenyAccounts)"
    if not own:
        return "it has no nodes"
    if not any(node.usable for node in own):
        return "all of its nodes are down or drained"
    return None


def _entry(partition: PartitionInfo, own: list[Node]) -> str:
    """The partition as an entry of the list."""
    cpus, memory, has = smallest(_usable(own))
    keys: dict[str, str] = {"name": _text(partition.name)}
    keys["cpus"] = str(min(cpus, partition.max_cpus or cpus))
    keys["memory"] = format_memory(min(memory, partition.max_memory or memory) * 2**20)
    if has:
        keys["gpus"] = str(sum(each.number for each in has))
        if len(has) == 1 and has[0].kind:
            keys["gpu_type"] = _text(has[0].kind)
    limits = [limit for limit in (partition.max_nodes, len(own) or partition.nodes) if limit]
    if limits:
        keys["max_nodes"] = str(min(limits))
    if partition.max_time is not None:
        keys["max_time"] = format_duration(partition.max_time)
    return f"- {{{', '.join(f'{key}: {value}' for key, value in keys.items())}}}"


def _usable(own: list[Node]) -> list[Node]:
    return [node for node in own if node.usable] or own


def _remarks(partition: PartitionInfo, own: list[Node]) -> Iterator[str]:
    usable = _usable(own)
    if partition.default:
        yield "The cluster's default."
    if partition.preempted:
        yield f"Its jobs may have to make room for others (PreemptMode={partition.preempted})."
    if partition.whole_nodes:
        yield "Jobs get whole nodes."
    if partition.qos is not None:
        yield f"Only with a QOS of {', '.join(sorted(partition.qos))}: see slurm.options.qos."
    if partition.accounts is not None:
        allowed = ", ".join(sorted(partition.accounts))
        yield f"Only with an account of {allowed}: see slurm.options.account."
    if len(usable) < len(own):
        yield f"{len(own) - len(usable)} of {len(own)} nodes are down or drained."
    kinds = Counter((node.cpus, node.memory, node.gpus) for node in usable)
    if len(kinds) == 1:
        (kind,) = kinds
        if len(kind[2]) > 1:
            yield f"Each node has {_gpu_words(kind)}; slurm.gpu_type in a recipe chooses."
        return
    yield "The nodes differ; the line has what each of them has:"
    for kind, count in kinds.most_common():
        memory = format_memory(kind[1] * 2**20)
        yield f"  {count} with {kind[0]} CPUs, {memory}, {_gpu_words(kind)}"
    if any(kind[2] for kind in kinds) and not all(kind[2] for kind in kinds):
        yield "  For jobs with GPUs, write the numbers of the nodes that have some."


def _gpu_words(kind: tuple[int, int, tuple[tuple[str | None, int], ...]]) -> str:
    words = [f"{count} GPUs {name}" if name else f"{count} GPUs" for name, count in kind[2]]
    return " and ".join(words) or "no GPUs"


def _slurm_lines(
    answers: Answers, config: dict[str, str], found: list[Association]
) -> Iterator[str]:
    size = config.get("MaxArraySize", "1001")
    if size == "0":
        yield "# MaxArraySize is 0: this cluster takes no arrays, and hpcml needs them. Ask for it."
    database = config.get("AccountingStorageType", "").removeprefix("accounting_storage/")
    yield "slurm:"
    yield f"  max_array_size: {size if size.isdecimal() and int(size) else 1}"
    if not answers.sacct or database not in ("slurmdbd", "mysql"):
        yield f"  # {'sacct does not answer' if database == 'slurmdbd' else 'No slurmdbd'}: ended "
        yield "  # jobs are known by their files alone."
        yield "  accounting: false"
    else:
        yield "  accounting: true"
    yield "  # Where users may not requeue their jobs (hpcml site check tries it): chain."
    yield "  # coming_back: chain"
    yield from _account_lines(answers, config, found)


def _account_lines(
    answers: Answers, config: dict[str, str], found: list[Association]
) -> Iterator[str]:
    if not found:
        enforced = "associations" in config.get("AccountingStorageEnforce", "")
        if enforced and answers.associations is not None:
            yield "  # This user has no account on the cluster, and it demands one: ask for it."
        return
    yield "  # Accounts of the user, and their limits; Slurm takes the default one by itself:"
    for entry in found:
        where = f" in {entry.partition}" if entry.partition else ""
        yield f"  #   {_line(entry.account + where)}: {_limits(entry.limits)}"
    allowed = dict.fromkeys(name for entry in found for name in entry.qos)
    limits = qos_limits(answers.qos or "")
    if allowed:
        yield "  # Qualities of service, and theirs:"
        for name in allowed:
            yield f"  #   {_line(name)}: {_limits(limits.get(name, {}))}"
    yield f"  # options: {{account: {_text(found[0].account)}}}"


def _limits(limits: dict[str, str]) -> str:
    return _line(" ".join(f"{name}={value}" for name, value in limits.items()) or "no limits")


def _container_lines(runtimes: Iterable[str]) -> Iterator[str]:
    first, *others = runtimes or ("",)
    if not first:
        yield "# No container runtime was found on this host; the nodes may have one."
        yield "# container: {runtime: apptainer}"
        return
    if others:
        yield f"# Found too: {', '.join(others)}"
    yield f"container: {{runtime: {first}}}"


def _match(host: str) -> str:
    """A regular expression for this host and those that differ in numbers."""
    parts = re.split(r"(\d+)", host)
    pattern = "".join(r"\d+" if part.isdigit() else re.escape(part) for part in parts)
    # Single quotes keep the backslashes readable.
    return f"'{pattern}'" if pattern.isprintable() and "'" not in pattern else _text(pattern)


def _text(value: str) -> str:
    """``value`` as YAML."""
    if _PLAIN.fullmatch(value) and value.lower() not in _WORDS_OF_YAML:
        return value
    kept = (
        each if each.isprintable() and each not in '"\\' else f"\\U{ord(each):08x}"
        for each in value
    )
    return f'"{"".join(kept)}"'


def _line(value: str) -> str:
    """``value`` in a comment."""
    return "".join(each if each.isprintable() else " " for each in value)
