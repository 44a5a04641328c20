"""What the probe of a partition saw, in words: what is right, and what to change where it isn't."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from hpcml.site.check import Check
from hpcml.site.schema import Site

# Times of events are compared across machines; nothing needs more than seconds.
CLOCK_SECONDS = 5.0


@dataclass
class Seen:
    """What was seen of one partition; what is not known yet, or never will be, is empty.

    Attributes:
        gpus: whether a GPU was asked for.
        runtime: the command that starts containers, or nothing.
        job, nodes: the job, and how many nodes it got.
        alone: why it got one node only.
        refused: what sbatch said instead of submitting it.
        not_started: why it did not start.
        invisible: how it ended, where nothing it wrote is seen on the login node.
        python, python_good: what the site's Python on the node said of its version.
        reports: what the nodes reported, the first node first.
        login, login_error: the login node's meeting with the first node.
        script_signalled, signalled, signal_error: whether the script, and how many nodes'
            programs, got the signal.
        back, requeue_error: seconds until the requeued job was back.
        printed: the end of what the job printed on stderr.
    """

    gpus: bool
    runtime: str
    job: int | None = None
    nodes: int = 0
    alone: str | None = None
    refused: str | None = None
    not_started: str | None = None
    invisible: str | None = None
    python: str | None = None
    python_good: bool = False
    reports: list[dict[str, Any]] = field(default_factory=list)
    login: dict[str, Any] | None = None
    login_error: str | None = None
    script_signalled: bool = False
    signalled: int = 0
    signal_error: str | None = None
    back: float | None = None
    requeue_error: str | None = None
    printed: str = ""


def checks(seen: Seen, site: Site) -> list[Check]:
    """What is good, what failed and what was skipped."""
    start = _start(seen)
    if start is not None:
        return [start]
    found = [_python(seen, site)]
    if not seen.reports:
        said = f"; it printed: {seen.printed}" if seen.printed else ""
        found.append(Check("report", False, f"the nodes reported nothing{said}"))
        return found
    if len(seen.reports) < seen.nodes:
        said = f"; the job printed: {seen.printed}" if seen.printed else ""
        found.append(Check("nodes", False, f"one of two nodes reported nothing{said}"))
    found += _shared_folder(seen)
    found += _between_nodes(seen)
    found.append(_clocks(seen))
    found.append(_gpus(seen))
    found.append(_runtime(seen))
    found.append(_signal(seen, site))
    found.append(_requeue(seen, site))
    return found


def _start(seen: Seen) -> Check | None:
    if seen.refused is not None:
        return Check("submit", False, seen.refused)
    if seen.not_started is not None:
        return Check(
            "start",
            False,
            f"job {seen.job} {seen.not_started}; try --wait with more, or another --partition",
        )
    if seen.invisible is not None:
        return Check(
            "runs root",
            False,
            f"the job ran, and nothing it wrote is seen here: {seen.invisible}; "
            "set runs to a folder that the nodes share",
        )
    return None


def _python(seen: Seen, site: Site) -> Check:
    if seen.python_good:
        return Check("python", True, str(seen.python))
    said = seen.python or seen.printed or "nothing"
    return Check(
        "python",
        False,
        f"no Python of 3.9 or newer on the node, it said: {said}; set python to one that the "
        f"nodes have{'' if site.python else ', since the one that runs hpcml may be here only'}",
    )


def _shared_folder(seen: Seen) -> Iterator[Check]:
    errors = [str(report["error"]) for report in seen.reports if "error" in report]
    answers = [report["answer"] for report in seen.reports if "answer" in report]
    if answers:
        yield Check("files", True, f"seen there and answered within {max(answers):.2f} s")
    elif errors:
        yield Check("files", False, f"{errors[0]}; runs must be a folder that the nodes share")
    if seen.login is not None and not errors:
        yield from _meeting("login and node", seen.login)
    else:
        error = seen.login_error or (errors[0] if errors else "nothing was heard")
        yield Check("login and node", False, f"{error}; choose another filesystem for runs")


def _meeting(name: str, found: dict[str, Any]) -> Iterator[Check]:
    rename = f"rename, append seen within {max(found['rename'], 0.05):.2f} s"
    if found["lock"] is None:
        yield Check(name, True, f"{rename}, flock")
    else:
        yield Check(name, True, rename)
        yield Check(
            "flock",
            False,
            f"{name}: {found['lock']}; mount the filesystem of runs with locks (Lustre: -o flock), "
            "or choose another",
        )


def _between_nodes(seen: Seen) -> Iterator[Check]:
    if seen.nodes < 2:
        yield Check("two nodes", None, seen.alone or "one node")
        return
    second = next((r["nodes"] for r in seen.reports[1:] if "nodes" in r), None)
    if second is None:
        return
    yield from _meeting("two nodes", second["meeting"])
    network = second["network"]
    if "error" in network:
        yield Check(
            "network",
            False,
            f"the second node does not reach the first, {network['error']}; jobs of several nodes "
            "need names and ports between nodes",
        )
    else:
        yield Check("network", True, f"node to node and back in {network['seconds'] * 1000:.1f} ms")


def _clocks(seen: Seen) -> Check:
    """How far the nodes' clocks are from the login node's and from each other's."""
    known = [(report["clock"], report["uncertain"]) for report in seen.reports if "clock" in report]
    if not known:
        return Check("clocks", None, "not known")
    worst, uncertain = max(known, key=lambda pair: abs(pair[0]))
    text = f"{worst:+.2f} s from the login node's (±{uncertain:.2f})"
    apart = 0.0
    if len(known) > 1:
        between = known[0][0] - known[1][0]
        error = known[0][1] + known[1][1]
        text += f", {abs(between):.2f} s between nodes (±{error:.2f})"
        apart = abs(between) - error
    if max(abs(worst) - uncertain, apart) > CLOCK_SECONDS:
        return Check("clocks", False, f"{text}; have them set by NTP")
    return Check("clocks", True, text)


def _gpus(seen: Seen) -> Check:
    if not seen.gpus:
        return Check("GPUs", None, "the partition has none")
    words = []
    for report in seen.reports:
        if not report["gpus"]:
            there = f"; nvidia-smi sees {len(report['devices'])}" if report["devices"] else ""
            return Check(
                "GPUs",
                False,
                f"{report['host']}: one was asked for, and CUDA_VISIBLE_DEVICES is not set{there}; "
                "try slurm.options.gpu_option: gpus-per-node, or ask the admins for gres.conf",
            )
        name, value = next(iter(report["gpus"].items()))
        words.append(f"{name}={value}")
        if report["devices"] is not None:
            words[-1] += f" ({', '.join(report['devices']) or 'nvidia-smi sees none'})"
    return Check("GPUs", True, ", ".join(dict.fromkeys(words)))


def _runtime(seen: Seen) -> Check:
    if not seen.runtime:
        return Check("containers", None, "the site names no command that starts them")
    for report in seen.reports:
        good, said = report.get("runtime", (False, "not tried"))
        if not good:
            return Check(
                "containers",
                False,
                f"{report['host']}: {seen.runtime} --version: {said}; a line in setup may be "
                "missing (module load), or container.runtime is another",
            )
    return Check("containers", True, str(seen.reports[0]["runtime"][1]).splitlines()[0])


def _signal(seen: Seen, site: Site) -> Check:
    name = site.signal.name
    if seen.signal_error:
        return Check("signal", False, seen.signal_error)
    if seen.signalled == seen.nodes:
        return Check("signal", True, f"{name} reached the script and the program on every node")
    if not seen.script_signalled:
        said = f"{name} did not reach the batch script"
    else:
        said = f"{name} reached the batch script, and {seen.signalled} of {seen.nodes} programs"
    return Check("signal", False, f"{said}; try another signal.name (USR2, TERM)")


def _requeue(seen: Seen, site: Site) -> Check:
    if site.slurm.coming_back != "requeue":
        return Check("requeue", None, f"coming_back: {site.slurm.coming_back}")
    if seen.back is not None:
        return Check("requeue", True, f"back after {seen.back:.0f} s, SLURM_RESTART_COUNT=1")
    if seen.requeue_error is None:
        return Check("requeue", None, "not tried, since the signal did not arrive")
    return Check("requeue", False, f"{seen.requeue_error}; set slurm.coming_back: chain")
