"""Why a pod waits, or how it ended, in words."""

from __future__ import annotations

from typing import Any

from hpcml.launch.volcano.client import Object

#: Phases in which a job has ended and will not come back by itself.
ENDED = frozenset(("Completed", "Failed", "Aborted", "Terminated"))
#: Phases in which it is about to end, and starts nothing any more.
ENDING = frozenset(("Aborting", "Terminating", "Completing"))

_IMAGE = ("ImagePullBackOff", "ErrImagePull", "ErrImageNeverPull", "InvalidImageName")

_ENDS = {
    "Aborted": "was aborted",
    "Completed": "ended",
    "Failed": "failed",
    "Terminated": "was ended",
}


def waits(job: Object, pod: Object | None, group: Object | None, queue: Object | None) -> str:
    """Why a pod of a job does not run yet.

    Args:
        job: the job.
        pod: the pod, if there is one.
        group: the job's PodGroup, if it was asked for.
        queue: the job's queue, if it was asked for.
    """
    if pod is not None:
        waiting = _container(pod).get("state", {}).get("waiting") or {}
        reason, message = str(waiting.get("reason", "")), _short(waiting.get("message"))
        if reason in _IMAGE:
            return f"waits: its image cannot be fetched: {message or reason}"
        if reason.startswith("Create"):
            return f"waits: its container cannot be made: {message or reason}"
        if reason and reason not in ("ContainerCreating", "PodInitializing"):
            return f"waits: {reason}{': ' + message if message else ''}"
        if pod["spec"].get("nodeName"):
            return "starts: its node fetches the image and what it sees"
    name = job["spec"].get("queue", "default")
    state = ((queue or {}).get("status") or {}).get("state")
    if state in ("Closed", "Closing"):
        return f"waits: the queue {name} is {state.lower()}"
    said = _unschedulable(pod) or _unschedulable(group)
    gang = job["spec"].get("minAvailable", 1)
    if gang > 1:
        return f"waits for room for its {gang} pods at once{': ' + said if said else ''}"
    if said:
        return f"waits for room: {said}"
    phase = ((group or {}).get("status") or {}).get("phase")
    if phase == "Pending":
        return f"waits for the queue {name} to admit it: what the queue may use is in use"
    return "waits to be looked at by the scheduler"


def ended(job: Object | None, pod: Object | None) -> tuple[str, bool]:
    """How a pod ended that left no word, and whether it lacked memory."""
    if pod is not None:
        terminated = _container(pod).get("state", {}).get("terminated") or {}
        status = pod.get("status") or {}
        why, code = terminated.get("reason") or status.get("reason"), terminated.get("exitCode")
        if why == "OOMKilled":
            return "its pod ran out of memory", True
        if status.get("reason") == "DeadlineExceeded":
            return "its pod did not leave in time", False
        if status.get("reason") in ("Evicted", "NodeLost", "Shutdown", "Terminated"):
            return f"its pod was evicted: {_short(status.get('message')) or why}", False
        if status.get("phase") in ("Failed", "Succeeded"):
            said = _short(terminated.get("message"))
            return f"its pod ended with exit code {code}{': ' + said if said else ''}", False
    if job is None:
        return "its job is no longer on the server", False
    state = (job.get("status") or {}).get("state") or {}
    phase, message = str(state.get("phase", "")), _short(state.get("message"))
    what = _ENDS.get(phase, "has no pod for it any more")
    return f"its job {what}{': ' + message if message else ''}", False


def exit_code(pod: Object) -> int | None:
    """The exit code of a pod that has ended."""
    code = (_container(pod).get("state", {}).get("terminated") or {}).get("exitCode")
    return None if code is None else int(code)


def _container(pod: Object) -> dict[str, Any]:
    statuses = (pod.get("status") or {}).get("containerStatuses") or [{}]
    return dict(statuses[0])


def _unschedulable(thing: Object | None) -> str:
    """What the scheduler wrote of a pod or a group that it could not place."""
    for condition in ((thing or {}).get("status") or {}).get("conditions") or []:
        kind, status = condition.get("type"), condition.get("status")
        if (kind, status) in (("PodScheduled", "False"), ("Unschedulable", "True")):
            return _short(condition.get("message") or condition.get("reason"))
    return ""


def _short(text: object) -> str:
    return " ".join(str(text or "").split())[:300]
