"""Trying a Slurm site: a short job on each partition, which meets the login node."""

from __future__ import annotations

import getpass
import json
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcml.errors import UserError
from hpcml.launch.slurm.client import SlurmError, run
from hpcml.launch.slurm.query import ENDED, JobState, Queue, queue
from hpcml.launch.slurm.reasons import is_stuck, words
from hpcml.launch.slurm.text import NoJobId, submitted_job
from hpcml.plan.resources import Resources
from hpcml.plan.slurm import directives
from hpcml.recipe.load import load_recipe
from hpcml.render.probe import render_probe
from hpcml.site.check import Check
from hpcml.site.cluster import settings
from hpcml.site.probe import Seen, checks
from hpcml.site.schema import Partition, Site
from hpcml.worker import probe as node

TICK = 0.05
ASK_SECONDS = 2.0
TIME = 300
# A requeued job waits until its old credential has expired, two minutes unless Slurm is told so.
BACK_SECONDS = 300.0
# What the job wrote last may be seen here later than that it ended.
GRACE_SECONDS = 10.0
SIGNAL_SECONDS = 60.0

Steps = Generator[None, None, None]


def check_commands(site: Site) -> Iterator[Check]:
    """Whether the commands of Slurm are here and answer."""
    yield _attempt("sbatch", lambda: run(["sbatch", "--version"], timeout=30).strip())
    yield _attempt("squeue", lambda: f"{len(queue(getpass.getuser()).tasks)} jobs of yours")
    yield _attempt("scontrol", lambda: _configuration(site))
    if site.slurm.accounting:
        yield _attempt("sacct", _accounting)
    else:
        yield Check("sacct", None, "accounting: false")
    if site.container is not None and site.container.runtime == "pyxis":
        yield _attempt("pyxis", _pyxis)


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except (SlurmError, ValueError) as error:
        return Check(name, False, str(error))


def _configuration(site: Site) -> str:
    config = settings(run(["scontrol", "show", "config"], timeout=30))
    largest = config.get("MaxArraySize", "")
    if largest.isdigit() and int(largest) < site.slurm.max_array_size:
        raise ValueError(
            f"slurm.max_array_size is {site.slurm.max_array_size}, the cluster's {largest}; "
            f"set it to {largest}"
        )
    return f"cluster {config.get('ClusterName')}, MaxArraySize {largest}"


def _accounting() -> str:
    try:
        run(["sacct", "--noheader", "--allocations", "--starttime=now"], timeout=30)
    except SlurmError as error:
        raise ValueError(f"{error}; without it set slurm.accounting: false") from None
    return "answers"


def _pyxis() -> str:
    if "--container-image" not in run(["srun", "--help"], timeout=30):
        raise ValueError("srun has no --container-image: choose another container.runtime")
    return "srun has --container-image"


@dataclass(eq=False)
class _Probe:
    """One partition's job.

    Attributes:
        state: what squeue said last.
        gone: when squeue first did not show it any more.
        said: what it was last said to wait for.
    """

    partition: Partition | None
    folder: Path
    seen: Seen
    state: JobState | None = None
    gone: float | None = None
    said: str = ""

    @property
    def name(self) -> str:
        return self.partition.name if self.partition else "the default"


class Prober:
    """Tries partitions of a site, all at the same time.

    Args:
        site: the site.
        root: the runs root, in which the probe has a folder while it runs.
        wait: how long a job may take to start, in seconds.
        say: told what is waited for.
    """

    def __init__(self, site: Site, root: Path, wait: float, say: Callable[[str], None]) -> None:
        self._site = site
        self._root = root
        self._wait = wait
        self._say = say
        self._name = f"hpcml_check_{secrets.token_hex(4)}"
        self._asked = 0.0

    def run(self, partitions: Sequence[Partition]) -> Iterator[tuple[str, list[Check]]]:
        """Yield a title and the checks of each partition, as soon as it is through.

        However it ends, also by an exception, no job and no file is left.
        """
        self._root.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".check-", dir=self._root))
        try:
            probes = [
                self._prepare(partition, folder / str(number))
                for number, partition in enumerate(partitions or [None])
            ]
            yield from self._follow(probes)
        finally:
            self._clean(folder)

    def _prepare(self, partition: Partition | None, folder: Path) -> _Probe:
        for each in (folder, folder / "login", folder / "nodes"):
            each.mkdir(mode=0o700)
        shutil.copyfile(node.__file__, folder / "probe.py")
        gpus = bool(partition and partition.gpus)
        container = self._site.container
        runtime = "" if container is None or container.runtime == "pyxis" else container.runtime
        return _Probe(partition, folder, Seen(gpus=gpus, runtime=runtime))

    def _follow(self, probes: list[_Probe]) -> Iterator[tuple[str, list[Check]]]:
        going = {probe: self._steps(probe) for probe in probes}
        while going:
            self._ask(list(going))
            for probe, steps in list(going.items()):
                if next(steps, self) is None:
                    continue
                del going[probe]
                self._collect(probe)
                title = f"partition {probe.name}"
                hosts = [str(report["host"]) for report in probe.seen.reports]
                if hosts:
                    title += f": job {probe.seen.job} on {' and '.join(hosts)}"
                yield title, checks(probe.seen, self._site)
            time.sleep(TICK)

    def _steps(self, probe: _Probe) -> Steps:
        seen, folder = probe.seen, probe.folder
        if not self._submit(probe):
            return
        if not (yield from self._starts(probe)):
            return
        yield from self._greet(probe)
        yield from self._meet(probe)
        for rank in range(seen.nodes):
            yield from self._until(probe, f"report.{rank}", node.LIMIT + GRACE_SECONDS)
        if len(list(folder.glob("report.*[0-9]"))) < seen.nodes:
            return
        name = self._site.signal.name
        try:
            run(["scancel", f"--signal={name}", "--batch", str(seen.job)])
        except SlurmError as error:
            seen.signal_error = str(error)
            return
        for rank in range(seen.nodes):
            yield from self._until(probe, f"signalled.{rank}", SIGNAL_SECONDS)
        if self._site.slurm.coming_back == "requeue":
            yield from self._comes_back(probe)

    def _submit(self, probe: _Probe) -> bool:
        """Submit with two nodes where that may be, else with one."""
        allowed = probe.partition.max_nodes if probe.partition else None
        seen = probe.seen
        if allowed == 1:
            seen.alone = "max_nodes is 1"
        for nodes in (2, 1) if allowed != 1 else (1,):
            try:
                script = self._script(probe, nodes)
                seen.job = submitted_job(run(["sbatch", "--parsable", str(script)])).number
            except UserError as error:
                # The place it names is the recipe of the probe, which nobody else sees.
                seen.refused = str(error).replace(f"{probe.folder}/recipe.yaml:", "the probe:")
            except (SlurmError, NoJobId) as error:
                said = str(error).strip() or "sbatch names no job"
                seen.refused = (
                    f"{said}; look at partitions and slurm.options (account, qos) of the site"
                )
            else:
                seen.nodes, seen.refused = nodes, None
                return True
            if nodes == 2:
                seen.alone = f"2 nodes were refused: {seen.refused}"
        return False

    def _script(self, probe: _Probe, nodes: int) -> Path:
        """Write the script; its options are those that a recipe would get."""
        partition, site = probe.partition, self._site
        limit = partition.max_time if partition else None
        time_limit = min(TIME, limit) if limit else TIME
        slurm: dict[str, str] = {"partition": partition.name} if partition else {}
        if partition and partition.gpus and partition.gpu_type:
            slurm["gpu_type"] = partition.gpu_type
        gpus = int(probe.seen.gpus)
        recipe = probe.folder / "recipe.yaml"
        recipe.write_text(
            json.dumps(
                {
                    "name": self._name,
                    "kind": "command",
                    "command": {"run": ["true"]},
                    "resources": {"nodes": nodes, "gpus": gpus, "time": f"{time_limit}s"},
                    "slurm": slurm,
                }
            )
        )
        resources = Resources(nodes, 1, 1, gpus, None, time_limit)
        lead = min(site.signal.lead, time_limit // 2)
        options, _ = directives(load_recipe(recipe), resources, site, lead)
        script = probe.folder / "script.sh"
        python = site.python or sys.executable
        text = render_probe(site, options, nodes, probe.folder, python, probe.seen.runtime)
        script.write_text(text)
        return script

    def _starts(self, probe: _Probe) -> Generator[None, None, bool]:
        began = time.monotonic()
        while not (probe.folder / "began.0").exists():
            waited = time.monotonic() - began
            reason = "is submitted"
            if probe.state is not None:
                reason = words(probe.state.reason, str(probe.seen.job))
            pending = probe.state is not None and probe.state.state == "PENDING"
            if pending and reason != probe.said:
                probe.said = reason
                self._say(f"partition {probe.name}: job {probe.seen.job} {reason}")
            if pending and (is_stuck(reason) or reason.startswith("waits: its partition")):
                probe.seen.not_started = reason
            elif pending and waited > self._wait:
                probe.seen.not_started = f"did not start in {self._wait:.0f} s: {reason}"
            elif self._ended(probe) or (not pending and waited > self._wait + node.LIMIT):
                probe.seen.invisible = self._end(probe)
            else:
                yield
                continue
            return False
        return True

    def _greet(self, probe: _Probe) -> Steps:
        """Answer the nodes; the answer says what time it is here."""
        silent = set(range(probe.seen.nodes))
        began = time.monotonic()
        while silent and not self._ended(probe) and time.monotonic() - began < node.LIMIT:
            for rank in list(silent):
                if node.heard(str(probe.folder), f"hello.{rank}") is not None:
                    node.say(str(probe.folder), f"reply.{rank}", time=time.time())
                    silent.remove(rank)
            yield

    def _meet(self, probe: _Probe) -> Steps:
        """Be the second side of a meeting with the first node."""
        meeting = node.second(str(probe.folder / "login"))
        while not self._ended(probe):
            try:
                next(meeting)
            except StopIteration as end:
                probe.seen.login = end.value
                return
            except node.NotSeen as error:
                probe.seen.login_error = str(error)
                return
            yield
        probe.seen.login_error = self._end(probe)

    def _comes_back(self, probe: _Probe) -> Steps:
        """Wait for the second start of the job; it is given up where Slurm has refused it."""
        folder, seen = probe.folder, probe.seen
        began = time.monotonic()
        while time.monotonic() - began < BACK_SECONDS:
            if (folder / "back.0").exists():
                seen.back = time.monotonic() - began
                return
            code = node.read(str(folder / "requeue.code"))
            if code is not None and code.strip() not in ("", "0"):
                seen.requeue_error = (node.read(str(folder / "requeue.error")) or "").strip()
                return
            if self._ended(probe):
                seen.requeue_error = f"it did not come back: {self._end(probe)}"
                return
            if not probe.said.startswith("comes back"):
                probe.said = "comes back"
                self._say(f"partition {probe.name}: job {seen.job} is to come back after a requeue")
            yield
        seen.requeue_error = f"it did not come back in {BACK_SECONDS:.0f} s"

    def _until(self, probe: _Probe, name: str, limit: float) -> Steps:
        began = time.monotonic()
        while not (probe.folder / name).exists():
            if self._ended(probe) or time.monotonic() - began > limit:
                return
            yield

    def _ask(self, probes: list[_Probe]) -> None:
        """Ask squeue once for all, every few seconds."""
        now = time.monotonic()
        if now - self._asked < ASK_SECONDS:
            return
        known: Queue | None
        try:
            known = queue(getpass.getuser())
        except SlurmError as error:
            self._say(str(error))
            known = None
        self._asked = time.monotonic()
        for probe in probes:
            if known is None or probe.seen.job is None:
                continue
            probe.state = known.find(probe.seen.job, 0)
            if probe.state is not None and probe.state.state not in ENDED:
                probe.gone = None
            elif probe.gone is None:
                probe.gone = self._asked

    def _ended(self, probe: _Probe) -> bool:
        return probe.gone is not None and time.monotonic() - probe.gone > GRACE_SECONDS

    def _end(self, probe: _Probe) -> str:
        """How a job ended, from the controller, which forgets it after some minutes."""
        try:
            text = run(["scontrol", "show", "job", "-o", str(probe.seen.job)])
        except SlurmError:
            return "its job ended"
        found = dict(part.split("=", 1) for part in text.split() if "=" in part)
        return f"its job ended ({found.get('JobState')}, exit code {found.get('ExitCode')})"

    def _collect(self, probe: _Probe) -> None:
        seen, folder = probe.seen, probe.folder
        for rank in range(seen.nodes):
            report = node.heard(str(folder), f"report.{rank}")
            if report is not None:
                seen.reports.append(report)
            if (folder / f"signalled.{rank}").exists():
                seen.signalled += 1
        code = node.read(str(folder / "python.code"))
        if code is not None:
            seen.python = (node.read(str(folder / "python")) or "").strip()
            seen.python_good = code.strip() == "0"
        seen.script_signalled = (folder / "script.signalled").exists()
        seen.printed = (node.read(str(folder / "job.err")) or "").strip()[-400:]

    def _clean(self, folder: Path) -> None:
        """Cancel by name, which also finds a job whose number was not read yet."""
        try:
            run(["scancel", f"--jobname={self._name}", "--quiet"])
            deadline = time.monotonic() + GRACE_SECONDS
            while time.monotonic() < deadline:
                if not run(["squeue", "--noheader", f"--name={self._name}"]).strip():
                    break
                time.sleep(0.5)
        except SlurmError as error:
            self._say(f"jobs of the name {self._name} may be left: {error}")
        shutil.rmtree(folder, ignore_errors=True)
        if folder.exists():
            self._say(f"{folder} could not be removed")
