"""Asking a Slurm for what a site file says of it."""

from __future__ import annotations

import getpass
import grp
import os
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

from hpcml.errors import UserError
from hpcml.launch.slurm.client import SlurmError, run
from hpcml.site.cluster import ASSOCIATION, QOS, settings
from hpcml.site.detect import Answers


def ask() -> Answers:
    """Ask the Slurm of this login node.

    Raises:
        UserError: there is none, or it gives no answer.
    """
    if shutil.which("scontrol") is None:
        raise UserError(
            "there is no command scontrol on this machine; `hpcml site detect` runs on a login "
            "node of a cluster with Slurm. Elsewhere the site `local` needs no file"
        )
    try:
        config = run(["scontrol", "show", "config"])
        partitions = run(["scontrol", "show", "partition", "-o"])
        nodes = run(["scontrol", "show", "node", "-o"])
    except SlurmError as error:
        raise UserError(str(error)) from None
    cluster = settings(config).get("ClusterName")
    user = getpass.getuser()
    where = [f"user={user}", *([f"cluster={cluster}"] if cluster else [])]
    return Answers(
        config=config,
        partitions=partitions,
        nodes=nodes,
        associations=_manager("assoc", *where, f"format={','.join((*ASSOCIATION, 'QOS'))}"),
        qos=_manager("qos", f"format={','.join(QOS)}"),
        sacct=_answers("sacct", "--noheader", "--allocations", "--starttime=now"),
        host=socket.gethostname(),
        groups=frozenset(_groups()),
        runs=_runs_root(user),
        runtimes=tuple(_runtimes()),
    )


def _manager(what: str, *words: str) -> str | None:
    try:
        return run(["sacctmgr", "--noheader", "--parsable2", "show", what, *words], timeout=30)
    except SlurmError:
        return None


def _answers(*command: str) -> bool:
    try:
        run(command, timeout=30)
    except SlurmError:
        return False
    return True


def _groups() -> Iterator[str]:
    for number in {os.getgid(), *os.getgroups()}:
        try:
            yield grp.getgrgid(number).gr_name
        except KeyError:
            continue


def _runs_root(user: str) -> tuple[str, str]:
    for name in ("SCRATCH", "PSCRATCH", "WORK"):
        folder = os.environ.get(name)
        if folder and os.path.isabs(folder) and os.access(folder, os.W_OK):
            return f"${name}/hpcml-runs", f"${name} is {folder} here."
    for parent in ("/scratch", "/work"):
        if os.access(Path(parent, user), os.W_OK):
            return f"{parent}/$USER/hpcml-runs", f"Nothing names a scratch folder; {parent} is one."
    return "~/hpcml-runs", "No scratch folder was found; the home folder may be small or slow."


def _runtimes() -> Iterator[str]:
    for name in ("apptainer", "singularity"):
        if shutil.which(name):
            yield name
    try:
        if "--container-image" in run(["srun", "--help"], timeout=30):
            yield "pyxis"
    except SlurmError:
        return
