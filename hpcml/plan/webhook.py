"""What Volcano's webhook refuses, and what would wait for ever: seen before any server is asked."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hpcml.errors import UserError
from hpcml.plan.volcano import LONGEST_DERIVED, LONGEST_NAME, Job
from hpcml.site.schema import Site

_DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_SERVICE = re.compile(r"[a-z]([a-z0-9-]*[a-z0-9])?")

# What Volcano's webhook takes from users (pkg/webhooks/admission/jobs/validate, v1.15).
_EVENTS = frozenset(
    (
        "*",
        "PodFailed",
        "PodEvicted",
        "PodPending",
        "Unknown",
        "TaskCompleted",
        "TaskFailed",
        "JobUpdated",
    )
)
_ACTIONS = frozenset(
    (
        "AbortJob",
        "RestartJob",
        "RestartTask",
        "RestartPod",
        "RestartPartition",
        "TerminateJob",
        "CompleteJob",
        "ResumeJob",
    )
)
_PLUGINS = frozenset(("env", "svc", "ssh", "mpi", "pytorch", "tensorflow", "ray", "hcclrank"))


def check_job(manifest: Mapping[str, Any], job: Job, site: Site) -> None:
    """Refuse a job that Volcano's webhook would, or that would wait for ever.

    The server's schema alone takes all of these. hpcml's own template has none of them; a site's
    may.

    Raises:
        UserError: with everything that is wrong.
    """
    found = list(_problems(manifest, job, site))
    if found:
        where = site.volcano.template or f"site {site.name}"
        lines = "\n".join(f"  {line}" for line in found)
        raise UserError(f"{where}: Volcano would not run this job\n{lines}")


def _problems(manifest: Mapping[str, Any], job: Job, site: Site) -> Iterator[str]:
    metadata, spec = manifest.get("metadata") or {}, manifest.get("spec") or {}
    for place, value, needed in (
        ("apiVersion", manifest.get("apiVersion"), "batch.volcano.sh/v1alpha1"),
        ("kind", manifest.get("kind"), "Job"),
        ("metadata.name", metadata.get("name"), job.name),
        ("metadata.namespace", metadata.get("namespace"), site.volcano.namespace),
        ("spec.schedulerName", spec.get("schedulerName"), "volcano"),
    ):
        if value != needed:
            yield f"{place}: is {value!r} and must be {needed!r}"
    yield from _policies("spec.policies", spec.get("policies") or [])
    for plugin in spec.get("plugins") or {}:
        if plugin not in _PLUGINS:
            yield f"spec.plugins: there is no {plugin} ({', '.join(sorted(_PLUGINS))})"
    yield from _claims(spec.get("volumes") or [])
    tasks = spec.get("tasks") or []
    if not tasks:
        yield "spec.tasks: there is none"
    names = [task.get("name") for task in tasks]
    for name in dict.fromkeys(names):
        if names.count(name) > 1:
            yield f"spec.tasks: there are two tasks {name}"
    for task in tasks:
        yield from _task(task)
        yield from _names(job.name, str(task.get("name")), task.get("replicas") or 0)
    total = sum(task.get("replicas") or 0 for task in tasks)
    if (spec.get("minAvailable") or 0) > total:
        yield f"spec.minAvailable: {spec['minAvailable']} of {total} pods"
    if total != job.pods:
        yield f"spec.tasks: they have {total} pods together and must have {job.pods}"


def _task(task: Mapping[str, Any]) -> Iterator[str]:
    place, replicas = f"spec.tasks.{task.get('name')}", task.get("replicas") or 0
    if replicas < 0:
        yield f"{place}.replicas: {replicas}"
    if (task.get("minAvailable") or 0) > replicas:
        yield f"{place}.minAvailable: {task['minAvailable']} of {replicas} pods"
    yield from _policies(f"{place}.policies", task.get("policies") or [])
    pod = (task.get("template") or {}).get("spec") or {}
    if pod.get("schedulerName") != "volcano":
        yield f"{place}.template.spec.schedulerName: must be 'volcano', or nobody keeps the gang"
    if pod.get("restartPolicy") != "Never":
        yield (
            f"{place}.template.spec.restartPolicy: must be 'Never'; with another Volcano sees no "
            "failure"
        )


def _policies(place: str, policies: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    events: list[str] = []
    codes: list[int] = []
    for policy in policies:
        named = list(dict.fromkeys([*policy.get("events", ()), policy.get("event")]))
        named = [event for event in named if event]
        code, action = policy.get("exitCode"), policy.get("action")
        if bool(named) == (code is not None):
            yield f"{place}: a policy has either events or an exit code ({dict(policy)})"
        if action not in _ACTIONS:
            yield f"{place}: there is no action {action!r} ({', '.join(sorted(_ACTIONS))})"
        for event in named:
            if event not in _EVENTS:
                yield f"{place}: no policy can be for the event {event!r}"
            if event in events:
                yield f"{place}: the event {event} has two policies"
        if code == 0:
            yield f"{place}: 0 is no exit code of a failure"
        if code in codes:
            yield f"{place}: the exit code {code} has two policies"
        events += named
        codes += [] if code is None else [code]
    if "*" in events and len(events) > 1:
        yield f"{place}: beside * there can be no other event"


def _claims(volumes: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    paths = [volume.get("mountPath") for volume in volumes]
    for volume in volumes:
        path = volume.get("mountPath")
        if not path or paths.count(path) > 1:
            yield f"spec.volumes: mountPath {path!r} is missing or there twice"
        if bool(volume.get("volumeClaim")) == bool(volume.get("volumeClaimName")):
            yield f"spec.volumes: {path} needs one of volumeClaim and volumeClaimName"


def _names(job: str, task: str, pods: int) -> Iterator[str]:
    """Names that Volcano derives: a pod that cannot have its own waits for ever."""
    if len(task) > LONGEST_NAME or not _DNS_LABEL.fullmatch(task):
        yield f"spec.tasks: {task!r} is no name of a task: a-z, 0-9 and -, at most {LONGEST_NAME}"
    longest = f"{job}-{task}-{max(pods - 1, 0)}"
    for kind, name, allowed in (
        ("pod", longest, _DNS_LABEL),
        ("service", job, _SERVICE),
        ("configmap", f"{job}-svc", _DNS_LABEL),
        ("claim", job + "x" * LONGEST_DERIVED, _DNS_LABEL),
    ):
        if len(name) > LONGEST_NAME or not allowed.fullmatch(name):
            yield (
                f"spec.tasks.{task}: its {kind} would be called {name}, of {len(name)} characters; "
                f"a-z, 0-9 and -, at most {LONGEST_NAME}, are possible"
            )
