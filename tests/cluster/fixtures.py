"""Fixtures for tests that need a real Slurm cluster, a real container or a real browser.

``slurm_cluster`` is shared by all pytest processes of this machine: the first one starts it, the
last one stops it, unless somebody had started it by hand. Tests use it side by side; one that
disturbs the others (it stops daemons, takes nodes away) is marked ``slurm_alone``: it waits until
nobody else uses the cluster, and the cluster is put in order after it.

Where there can be no cluster these tests are skipped, and with CI set in the environment they fail.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NoReturn

import pytest

__all__ = [
    "SlurmCluster",
    "apptainer",
    "chromium",
    "host_python_binds",
    "pytest_configure",
    "pytest_runtest_makereport",
    "slurm_cluster",
    "slurm_turn",
]

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
STATE = Path("/run/hpcml-cluster")
LOCKS = Path("/run/lock/hpcml-cluster")
#: In the state folder of a cluster that was started by tests, and that tests may stop.
OURS = STATE / "started-by-tests"
INSTALLATION_TIME = 900
# What is shown with a test that failed.
LOG_LINES, SHOWN_JOBS = 60, 5


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "slurm_alone: needs the Slurm cluster for itself")
    config.addinivalue_line("markers", "volcano_cluster: needs a Kubernetes with Volcano")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show with a test that failed what its cluster looked like then: afterwards nobody can."""
    report = yield
    cluster = getattr(item, "funcargs", {}).get("slurm_cluster")
    if report.failed and cluster is not None:
        report.sections.append(("Slurm", cluster.picture()))
    return report


class SlurmCluster:
    """The commands of a user and of an administrator."""

    nodes = tuple(f"n{number}" for number in range(1, 9))

    # --- as a user

    def run(
        self,
        *command: str | Path,
        timeout: float = 120,
        check: bool = True,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on the login node, which is this machine."""
        words = [str(word) for word in command]
        done = subprocess.run(
            words, text=True, capture_output=True, timeout=timeout, check=False, cwd=cwd or "/"
        )
        if check and done.returncode:
            pytest.fail(f"{words}: exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    def submit(self, *options: str | Path, script: str, folder: Path) -> str:
        """Submit the lines of a batch script, with ``folder`` as its folder; the job's id."""
        words = ["sbatch", "--parsable", f"--chdir={folder}", *options, f"--wrap={script}"]
        return self.run(*words).stdout.strip().partition(";")[0]

    def squeue(self, *options: str) -> list[dict[str, str]]:
        """One entry for each job or array task that is queued or running."""
        fields = ("id", "name", "partition", "state", "nodes", "reason")
        out = self.run("squeue", "-h", "-r", "-o", "%i|%j|%P|%T|%N|%r", *options).stdout
        return [dict(zip(fields, line.split("|"), strict=True)) for line in out.splitlines()]

    def sacct(self, job: str, *options: str, fields: str = "") -> list[dict[str, str]]:
        """Entries of a job's accounting, which lags behind by seconds; ``-D``: of every attempt."""
        columns = fields or "JobID,JobName,Partition,State,ExitCode,NodeList,Elapsed"
        out = self.run("sacct", "-X", "-P", "-j", job, "-o", columns, *options).stdout.splitlines()
        return [dict(zip(out[0].split("|"), line.split("|"), strict=True)) for line in out[1:]]

    def job(self, job: str) -> dict[str, str]:
        """What the controller knows: JobState, Restarts, Reason, NodeList, ..."""
        out = self.run("scontrol", "-o", "show", "job", job).stdout
        return dict(re.findall(r"(\w+)=(\S*)", out))

    def wait(self, job: str, *states: str, timeout: float = 60) -> dict[str, str]:
        """Until the controller says that the job is in one of the states."""
        self.wait_until(
            lambda: self.job(job)["JobState"] in states, timeout, lambda: str(self.job(job))
        )
        return self.job(job)

    def wait_accounted(
        self, job: str, states: list[str], *options: str, timeout: float = 30
    ) -> None:
        """Until the accounting has these states of the job, of its tasks or of its attempts."""

        def found() -> list[str]:
            return sorted(entry["State"] for entry in self.sacct(job, *options))

        self.wait_until(lambda: found() == sorted(states), timeout, lambda: str(found()))

    def wait_idle(self, timeout: float = 60) -> None:
        """Until no job is left and every node is idle."""

        def node_states() -> list[str]:
            return self.run("sinfo", "-h", "-N", "-p", "gpu", "-o", "%T").stdout.split()

        self.wait_until(
            lambda: not self.squeue() and node_states() == ["idle"] * len(self.nodes),
            timeout,
            lambda: f"{self.squeue()} {node_states()}",
        )

    @staticmethod
    def wait_until(
        condition: Callable[[], object], timeout: float, what: Callable[[], str] = str
    ) -> None:
        deadline = time.monotonic() + timeout
        while not condition():
            if time.monotonic() > deadline:
                pytest.fail(f"not within {timeout} s: {what()}")
            time.sleep(0.2)

    # --- as an administrator

    def set_node(self, name: str, state: str) -> None:
        """down, drain, resume, ..."""
        self.run("scontrol", "update", f"nodename={name}", f"state={state}", "reason=test")

    def stop_daemon(self, name: str, *, kill: bool = False) -> None:
        """munged, mariadbd, slurmdbd, slurmctld, or a node, which dies with all that runs on it."""
        self.run(HERE / "slurm", "stop", *(["--kill"] if kill else []), name)

    def start_daemon(self, name: str) -> None:
        self.run(HERE / "slurm", "start", name)

    def share(self, *folders: str | Path) -> None:
        """Let the nodes see folders of this machine's /tmp; they have a /tmp of their own."""
        self.run(HERE / "slurm", "share", *folders)

    def log(self, daemon: str) -> str:
        configuration = Path("/etc/slurm/slurm.conf").read_text()
        (path,) = re.findall(r"^SlurmctldLogFile=(.*)", configuration, re.MULTILINE)
        return Path(path).with_name(f"{daemon}.out").read_text(errors="replace")

    def picture(self) -> str:
        """All jobs, lost nodes, what is known of held jobs, and the end of the controller's log."""
        jobs = self._look("squeue", "--all", "--array", "-o", "%.12i %.16j %.9T %.10M %.6N %r")
        held = [line.split()[0] for line in jobs.splitlines() if "held" in line.lower()]
        log = self.log("slurmctld").splitlines()[-LOG_LINES:]
        parts = [jobs, self._look("sinfo", "--list-reasons"), "\n".join(log)]
        parts += [self._look("scontrol", "show", "job", job) for job in held[:SHOWN_JOBS]]
        return "\n\n".join(part.strip() for part in parts)

    def _look(self, *command: str) -> str:
        try:
            done = self.run(*command, check=False, timeout=30)
        except subprocess.TimeoutExpired:
            return f"{command[0]} gave no answer"
        return done.stdout + done.stderr

    @contextmanager
    def configured(self, change: Callable[[str], str]) -> Iterator[None]:
        """Let the cluster run with another slurm.conf; for tests that are alone."""
        configuration = Path("/etc/slurm/slurm.conf")
        before = configuration.read_text()
        try:
            configuration.write_text(change(before))
            self.run("scontrol", "reconfigure")
            yield
        finally:
            configuration.write_text(before)
            self.run("scontrol", "reconfigure")

    def put_in_order(self) -> None:
        """All daemons up, all nodes usable, no jobs."""
        daemons = ("munged", "mariadbd", "slurmdbd", "slurmctld", *self.nodes)
        self.run(HERE / "slurm", "start", *daemons)
        self.run("scancel", "--user=root", "--quiet", check=False)
        self.resume_nodes()
        self.wait_idle()

    def resume_nodes(self) -> None:
        """Take all nodes back that are down or drained."""
        lost = self.run("sinfo", "-h", "-N", "-p", "gpu", "-t", "down,drain", "-o", "%N").stdout
        for node in lost.split():
            self.run("scontrol", "update", f"nodename={node}", "state=resume", check=False)


@pytest.fixture(scope="session")
def slurm_cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """A running cluster whose nodes see the checkout, this Python and the tests' folders."""
    if reason := why_no_cluster():
        absent(reason)
    with locked("install"):
        install("slurm")
    cluster = SlurmCluster()
    with membership():
        cluster.share(REPOSITORY, sys.prefix, sys.base_prefix, tmp_path_factory.getbasetemp())
        yield cluster


@pytest.fixture(autouse=True)
def slurm_turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hold the cluster together with other tests or, when marked so, alone."""
    if "slurm_cluster" not in request.fixturenames:
        yield
        return
    cluster = request.getfixturevalue("slurm_cluster")
    alone = request.node.get_closest_marker("slurm_alone") is not None
    with lock_file("tests") as tests:
        with locked("turn"):  # so that those who come later do not overtake who waits to be alone
            fcntl.flock(tests, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        yield
        if alone:
            cluster.put_in_order()


@pytest.fixture(scope="session")
def apptainer() -> Path:
    """An image of this Debian release with Python; ``apptainer`` is installed."""
    if reason := why_no_debian():
        absent(reason)
    with locked("install"):
        install("apptainer")
        done = subprocess.run(
            [HERE / "apptainer", "image"], text=True, capture_output=True, timeout=INSTALLATION_TIME
        )
    if done.returncode:
        absent(f"no container image: {done.stderr}")
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def chromium() -> tuple[str, str]:
    """The programs of a browser and of its driver, from Debian where they are not installed."""
    programs = shutil.which("chromium"), shutil.which("chromedriver")
    if None in programs:
        if reason := why_no_debian():
            absent(f"no chromium: {reason}")
        with locked("install"):
            install("chromium")
    return shutil.which("chromium") or "", shutil.which("chromedriver") or ""


def host_python_binds() -> list[str]:
    """Options that make this Python, with all that is installed for it, run in the image.

    The image is of the same Debian release, so that a Python of Debian itself is in it already.
    Packages may lie elsewhere, where a .pth file says.
    """
    packages = {path for path in sys.path if path.endswith("-packages")}
    folders = {sys.prefix, sys.base_prefix, *packages} - {"/usr"}
    folders = {f for f in folders if not any(f.startswith(f"{other}/") for other in folders)}
    return [f"--bind={folder}:{folder}:ro" for folder in sorted(folders)]


# --- who uses the cluster


@contextmanager
def membership() -> Iterator[None]:
    """Be one of those who use the cluster.

    Everyone holds a shared lock, which the system takes away from a process that dies; who can get
    it exclusively is alone.
    """
    with lock_file("users") as users:
        with locked("start"):
            if alone(users):
                start()
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with locked("start"):
                if alone(users) and OURS.exists():
                    slurm("stop")


def start() -> None:
    if OURS.exists():  # left by tests that died, with whatever they had submitted
        slurm("stop")
    by_hand = slurm("status", check=False).returncode == 0
    slurm("start")
    if not by_hand:
        OURS.touch()


def slurm(verb: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run([HERE / "slurm", verb], text=True, capture_output=True, timeout=300)
    if check and done.returncode:
        pytest.fail(f"slurm {verb}: {done.stderr}", pytrace=False)
    return done


def alone(users: IO[str]) -> bool:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def lock_file(name: str) -> IO[str]:
    LOCKS.mkdir(parents=True, exist_ok=True)
    return (LOCKS / name).open("w")


@contextmanager
def locked(name: str) -> Iterator[None]:
    with lock_file(name) as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --- where there can be none


def why_no_debian() -> str | None:
    if os.geteuid():
        return "not root"
    release = Path("/etc/os-release")
    if not release.exists() or not re.search(r"^ID=debian$", release.read_text(), re.MULTILINE):
        return "not Debian"
    return None if shutil.which("apt-get") else "no apt-get"


def why_no_cluster() -> str | None:
    if reason := why_no_debian():
        return reason
    configuration = Path("/etc/slurm/slurm.conf")
    if configuration.exists() and "tests/cluster/slurm" not in configuration.read_text():
        return "this machine belongs to another Slurm cluster"
    unshare = ["unshare", "--net", "--uts", "--mount", "true"]
    if subprocess.run(unshare, capture_output=True, check=False).returncode:
        return "no right to make namespaces"
    return None


def install(script: str) -> None:
    done = subprocess.run(
        [HERE / script, "install"], text=True, capture_output=True, timeout=INSTALLATION_TIME
    )
    if done.returncode:
        absent(f"not installed: {done.stderr}")


def absent(reason: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"{reason}, and this is CI, where it must be there", pytrace=False)
    pytest.skip(reason)
