"""Whether a site's Volcano is there and takes jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from hpcml.launch.volcano.client import Cluster, VolcanoError
from hpcml.site.check import Check
from hpcml.site.schema import Site


def check_server(site: Site) -> Iterator[Check]:
    """Ask the server what hpcml asks of it, and about each queue; nothing is created."""
    settings = site.volcano
    try:
        cluster = Cluster(settings.model_dump())
        jobs = cluster.jobs("app.kubernetes.io/managed-by=hpcml")
    except VolcanoError as error:
        yield Check("server", False, str(error))
        return
    yield Check("server", True, f"{len(jobs)} jobs of hpcml in namespace {settings.namespace}")
    yield _attempt("pods", partial(_pods, cluster))
    queues = [settings.queue, *(pool.queue for pool in settings.pools.values() if pool.queue)]
    for name in dict.fromkeys(queues):
        yield _attempt(f"queue {name}", partial(_queue, cluster, name))


def _attempt(name: str, look: Callable[[], str]) -> Check:
    try:
        return Check(name, True, look())
    except (VolcanoError, ValueError) as error:
        return Check(name, False, str(error))


def _pods(cluster: Cluster) -> str:
    return f"{len(cluster.pods('app.kubernetes.io/managed-by=hpcml'))} of hpcml"


def _queue(cluster: Cluster, name: str) -> str:
    queue = cluster.queue(name)
    if queue is None:
        raise ValueError("there is no such queue; set volcano.queue, or create it")
    state = str((queue.get("status") or {}).get("state", "Unknown"))
    if state != "Open":
        raise ValueError(f"it is {state}, and takes no jobs")
    return "open"
