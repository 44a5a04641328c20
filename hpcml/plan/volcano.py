"""What a plan asks of Volcano: its pods, and its jobs."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from hpcml.errors import UserError
from hpcml.plan.container import read_by
from hpcml.plan.partitions import choose_partition
from hpcml.plan.resources import Resources
from hpcml.recipe.cell import Cell
from hpcml.recipe.load import LoadedRecipe
from hpcml.recipe.problems import Problems
from hpcml.site.images import known_images
from hpcml.site.schema import Site
from hpcml.site.volcano import Toleration

#: What a name that becomes a host name, a label or a service may have (RFC 1123, RFC 1035).
LONGEST_NAME = 63
# Volcano names claims after the job, with 12 characters at random: the longest that it derives.
LONGEST_DERIVED = len("-pvc-") + 12
LONGEST_JOB_NAME = LONGEST_NAME - LONGEST_DERIVED

#: Seconds for the worker's last words, after the time in which its ranks could save.
LAST_WORDS = 10
#: Volcano counts every restart of any pod against one number per job; budgets are the worker's.
NO_LIMIT = 2**31 - 1


@dataclass(frozen=True)
class Pod:
    """A pod of a plan: one node's part of a task, in Kubernetes' words.

    Attributes:
        image: the image, as a registry calls it.
        env: variables that are set inside, beside those of the site.
        queue: the queue of its job.
        requests, limits: its resources; quantities as Kubernetes writes them.
        node_selector: labels that its node must have.
        tolerations: taints that it ignores.
        volumes, mounts: what it sees.
        user: numeric user and group of its processes, or None for those of the image.
    """

    image: str
    env: dict[str, str]
    queue: str
    requests: dict[str, str]
    limits: dict[str, str]
    node_selector: dict[str, str]
    tolerations: tuple[dict[str, str], ...]
    volumes: tuple[dict[str, Any], ...]
    mounts: tuple[dict[str, Any], ...]
    user: tuple[int, int] | None


@dataclass(frozen=True)
class Job:
    """A job of Volcano: some lanes of a submission, each of which is a task after another.

    Lane ``n`` runs the tasks ``n``, ``n + stride``, ``n + 2 * stride`` … of the submission, so that
    no more tasks run at a time than there are lanes. Without a cap every task is a lane.

    Attributes:
        number: position among the jobs of the submission, from 0.
        name: its name, from which Volcano derives others.
        first: its first lane.
        lanes: how many lanes it has.
        pods: how many pods it has: one for each lane, or the nodes of its one lane.
        stride: how many lanes the submission has.
    """

    number: int
    name: str
    first: int
    lanes: int
    pods: int
    stride: int

    def tasks(self, total: int) -> int:
        """How many of the ``total`` tasks of the submission it runs."""
        return sum(
            -(-(total - lane) // self.stride) for lane in range(self.first, self.first + self.lanes)
        )


def pod_of(
    loaded: LoadedRecipe, cells: Sequence[Cell], resources: Resources, site: Site, root: Path
) -> Pod:
    """The pod of a recipe on a site.

    Raises:
        UserError: there is no image, pods don't see what they need, or no nodes have what they ask
            for.
    """
    recipe, settings = loaded.recipe, site.volcano
    problems = Problems(loaded.document)
    wanted = recipe.container
    image = wanted.image if wanted else settings.image
    if image is None:
        problems.add(
            ("container",),
            f"pods need an image, and site {site.name} has none (volcano.image): "
            "add `container: {image: …}`",
        )
    if wanted is not None and wanted.binds:
        problems.add(
            ("container", "binds"),
            "pods see what the site says (volcano.volumes), and nothing else; leave it out",
        )
    if recipe.env_from:
        problems.add(
            ("env_from",),
            "a pod has none of your environment; put the values into a Secret of the namespace, "
            "which the site names in volcano.secrets",
        )
    _check_seen(loaded, cells, site, root, problems)
    problems.raise_any()
    assert image is not None
    partition = choose_partition(loaded, resources, site)
    pool = settings.pools.get(partition.name) if partition else None
    tolerations = [*settings.tolerations, *(pool.tolerations if pool else ())]
    requests, limits = _resources(resources, recipe.array.pack, site)
    volumes, mounts = _volumes(site)
    return Pod(
        image=_registry_name(image, site, loaded),
        env=dict(wanted.env) if wanted else {},
        queue=(pool and pool.queue) or settings.queue,
        requests=requests,
        limits=limits,
        node_selector={**settings.node_selector, **(pool.node_selector if pool else {})},
        tolerations=tuple(_toleration(toleration) for toleration in tolerations),
        volumes=volumes,
        mounts=mounts,
        user=(os.getuid(), os.getgid()) if settings.user == "submitter" else None,
    )


def jobs_of(
    recipe: str, run_id: str, folder: Path, submission: int, site: Site, nodes: int, tasks: int,
    max_running: int | None,
) -> tuple[Job, ...]:  # fmt: skip
    """The jobs of a submission of ``tasks`` tasks, each on ``nodes`` nodes.

    A job of several nodes is a gang and has one lane, so that each starts when there is room for
    it. Others have as many lanes as a job of the site may have pods.
    """
    stride = min(tasks, max_running or tasks)
    most = site.volcano.max_job_size if nodes == 1 else 1
    return tuple(
        Job(
            number=number,
            name=job_name(recipe, run_id, folder, f"{submission}-{number}"),
            first=first,
            lanes=min(most, stride - first),
            pods=nodes if nodes > 1 else min(most, stride - first),
            stride=stride,
        )
        for number, first in enumerate(range(0, stride, most))
    )


def job_name(recipe: str, run_id: str, folder: Path, which: str) -> str:
    """A name for a job, from which everything that Volcano derives is a name as well.

    The run folder is in it as a hash, since a namespace is shared by people and runs roots.
    """
    end = f"-{run_id}-{mark_of(folder)[:6]}-{which}"
    start = re.sub("[^a-z0-9]+", "-", recipe.lower()).strip("-")
    start = start if start[:1].isalpha() else f"r-{start}"
    return start[: LONGEST_JOB_NAME - len(end)].rstrip("-") + end


def mark_of(folder: Path) -> str:
    """The label by which the jobs of a run are found."""
    return hashlib.sha256(f"{os.getuid()}\0{folder}".encode()).hexdigest()[:16]


def _registry_name(image: str, site: Site, loaded: LoadedRecipe) -> str:
    scheme, separator, name = image.partition("://")
    if not separator:
        name = image
    elif scheme != "docker":
        name = ""
    if name in known_images():
        name = ""  # a file of other sites
    if not name or name.endswith((".sif", ".sqsh")) or name.startswith("/"):
        where = f"site {site.name}: volcano.image"
        if loaded.recipe.container:
            where = f"{loaded.document.where('container.image')}: container.image"
        raise UserError(
            f"{where}: {image}: Kubernetes takes images from a registry, such as "
            "docker://nvcr.io/nvidia/pytorch:25.06-py3"
        )
    return name


def _resources(
    resources: Resources, pack: int, site: Site
) -> tuple[dict[str, str], dict[str, str]]:
    """Requests and limits of a pod. It may use cores that are idle, but no more memory."""
    requests = {"cpu": str(resources.processes * resources.cpus * pack)}
    limits = {}
    if resources.memory:
        limits["memory"] = f"{-(-resources.memory * pack // 2**20)}Mi"
    if resources.gpus:
        limits[site.volcano.gpu] = str(resources.gpus * pack)
    if resources.nodes > 1:
        limits.update({name: str(count) for name, count in site.volcano.rdma.items()})
    return {**requests, **limits}, limits


def _volumes(site: Site) -> tuple[tuple[dict[str, Any], ...], tuple[dict[str, Any], ...]]:
    volumes: list[dict[str, Any]] = []
    mounts: list[dict[str, Any]] = []
    sources: dict[tuple[str, str], str] = {}
    for volume in site.volcano.volumes:
        source: dict[str, Any]
        if volume.claim is not None:
            key = "claim", volume.claim
            source = {"persistentVolumeClaim": {"claimName": volume.claim}}
        else:
            key = "path", str(volume.host_path)
            source = {"hostPath": {"path": volume.host_path, "type": "Directory"}}
        if key not in sources:
            sources[key] = f"volume-{len(sources)}"
            volumes.append({"name": sources[key], **source})
        mount: dict[str, Any] = {"name": sources[key], "mountPath": volume.path}
        if volume.sub_path:
            mount["subPath"] = volume.sub_path
        if volume.read_only:
            mount["readOnly"] = True
        mounts.append(mount)
    if site.volcano.shared_memory:
        size = f"{-(-site.volcano.shared_memory // 2**20)}Mi"
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": size}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    return tuple(volumes), tuple(mounts)


def _toleration(toleration: Toleration) -> dict[str, str]:
    return {name: str(value) for name, value in toleration if value is not None}


def _check_seen(
    loaded: LoadedRecipe, cells: Sequence[Cell], site: Site, root: Path, problems: Problems
) -> None:
    """Whether pods see the runs root, and what the cells read and write."""
    volumes = [(PurePosixPath(v.path), v.read_only) for v in site.volcano.volumes]

    def seen(path: str, *, written: bool) -> bool:
        # The innermost volume decides.
        inside = [v for v in volumes if PurePosixPath(path).is_relative_to(v[0])]
        return bool(inside) and not (written and max(inside, key=lambda v: len(v[0].parts))[1])

    paths = ", ".join(str(path) for path, _ in volumes) or "none"
    if not seen(str(root), written=True):
        raise UserError(
            f"the runs root {root} is in no volume that pods of site {site.name} can write "
            f"(volcano.volumes: {paths}); choose another by --root, or add one"
        )
    for bind in read_by(loaded, cells):
        if not seen(bind.source, written=not bind.read_only):
            problems.add(
                ("train",) if loaded.recipe.train else ("infer",),
                f"{bind.source} is in no volume that pods of site {site.name} see "
                f"(volcano.volumes: {paths})",
            )
