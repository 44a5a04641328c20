"""Calling the server of Kubernetes, by its official client."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any

from hpcml.launch.cluster import SchedulerError

#: Seconds for a connection, and for an answer.
_TIMEOUT = (10, 120)
_PAGE = 500
_JOBS = ("batch.volcano.sh", "v1alpha1")
_SCHEDULING = ("scheduling.volcano.sh", "v1beta1")

Object = dict[str, Any]


class VolcanoError(SchedulerError):
    """The server refused, or cannot be reached; the message is what it said."""


class NoAnswer(VolcanoError):
    """The server did not answer in time; it may have done what it was asked all the same."""


class AlreadyThere(VolcanoError):
    """There is an object of that name."""


class Cluster:
    """A namespace of a Kubernetes with Volcano.

    Args:
        settings: the key ``volcano`` of a site.

    Raises:
        VolcanoError: the client is not installed, or nothing says where the server is.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        try:
            from kubernetes import client, config
        except ModuleNotFoundError as error:
            if not str(error.name).startswith("kubernetes"):
                raise
            raise VolcanoError(
                "the client of Kubernetes is not installed; pip install 'hpcml[volcano]'"
            ) from None
        self.namespace = str(settings["namespace"])
        configuration = client.Configuration()
        _configure(config, configuration, settings)
        # A call whose answer is lost is looked for by name, not made again blindly.
        configuration.retries = False
        api = client.ApiClient(configuration)
        self._objects = client.CustomObjectsApi(api)
        self._core = client.CoreV1Api(api)
        self._refused = client.exceptions.ApiException

    def create(self, manifest: Object, *, dry_run: bool = False) -> Object:
        """Create a job; unknown fields are an error.

        Args:
            manifest: the job.
            dry_run: let the server and Volcano's webhook check it, and create nothing.

        Raises:
            AlreadyThere: there is a job of that name.
            NoAnswer: it may have been created.
            VolcanoError: it was refused.
        """
        options = {"dry_run": "All"} if dry_run else {}
        return self._call(
            self._objects.create_namespaced_custom_object,
            *_JOBS,
            self.namespace,
            "jobs",
            manifest,
            field_validation="Strict",
            **options,
        )

    def job(self, name: str) -> Object | None:
        """A job by its name, or None."""
        return self._find(
            self._objects.get_namespaced_custom_object, *_JOBS, self.namespace, "jobs", name
        )

    def delete(self, name: str) -> None:
        """Delete a job, and with it its pods, which are asked to leave. It may be gone already.

        Raises:
            VolcanoError: the server refused.
        """
        self._find(
            self._objects.delete_namespaced_custom_object,
            *_JOBS,
            self.namespace,
            "jobs",
            name,
            propagation_policy="Foreground",
        )

    def jobs(self, label: str) -> list[Object]:
        """The jobs with a label, such as ``name=value``."""
        return self._list(
            self._objects.list_namespaced_custom_object,
            *_JOBS,
            self.namespace,
            "jobs",
            label_selector=label,
        )

    def pods(self, label: str) -> list[Object]:
        """The pods with a label."""
        return self._list(self._core.list_namespaced_pod, self.namespace, label_selector=label)

    def pod_group(self, job: Object) -> Object | None:
        """The group that stands for a job in its queue."""
        name, uid = job["metadata"]["name"], job["metadata"].get("uid")
        # Since Volcano 1.7 the job's id is in the name.
        for group in (f"{name}-{uid}", name):
            found = self._find(
                self._objects.get_namespaced_custom_object,
                *_SCHEDULING,
                self.namespace,
                "podgroups",
                group,
            )
            if found is not None:
                return found
        return None

    def queue(self, name: str) -> Object | None:
        """A queue, or None where there is none."""
        return self._find(self._objects.get_cluster_custom_object, *_SCHEDULING, "queues", name)

    def _list(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> list[Object]:
        items: list[Object] = []
        more: dict[str, Any] = {}
        while True:
            answer = self._call(function, *arguments, limit=_PAGE, **options, **more)
            items += answer.get("items") or []
            token = (answer.get("metadata") or {}).get("continue")
            if not token:
                return items
            more = {"_continue": token}

    def _find(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Object | None:
        try:
            return self._call(function, *arguments, **options)
        except _NotThere:
            return None

    def _call(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Object:
        """One call; the answer is JSON, without the client's own classes for every part of it."""
        from urllib3.exceptions import HTTPError

        try:
            response = function(
                *arguments, **options, _request_timeout=_TIMEOUT, _preload_content=False
            )
            answer = json.loads(response.data)
        except self._refused as error:
            raise _error(error) from None
        except (HTTPError, OSError, ValueError) as error:
            raise NoAnswer(f"the server of Kubernetes gave no answer: {error}") from None
        return answer if isinstance(answer, dict) else {}


class _NotThere(VolcanoError):
    pass


def _configure(config: Any, configuration: Any, settings: Mapping[str, Any]) -> None:
    """Where the server is, and who asks: as kubectl finds it, or as a pod is told."""
    named, context = settings.get("kubeconfig"), settings.get("context")
    if named:
        named = os.path.expanduser(os.path.expandvars(named))
    inside = "KUBERNETES_SERVICE_HOST" in os.environ
    files = os.environ.get("KUBECONFIG") or os.path.expanduser("~/.kube/config")
    try:
        if named or any(map(os.path.exists, files.split(os.pathsep))) or not inside:
            config.load_kube_config(
                named or files,
                context=context,
                client_configuration=configuration,
                persist_config=False,
            )
        else:
            config.load_incluster_config(client_configuration=configuration)
    except (config.ConfigException, OSError, ValueError, TypeError) as error:
        raise VolcanoError(
            f"nothing says where the server of Kubernetes is ({named or files}): {error}; set "
            "$KUBECONFIG, or the site's volcano.kubeconfig and volcano.context"
        ) from None


def _error(error: Any) -> VolcanoError:
    """The answer of the server, with the words that are meant for people."""
    body = error.body or ""
    body = body.decode(errors="replace") if isinstance(body, bytes) else str(body)
    try:
        said = str(json.loads(body)["message"])
    except (ValueError, KeyError, TypeError):
        said = body.strip()[:500] or str(error.reason)
    text = f"the server of Kubernetes: {said}"
    if error.status == 404:
        return _NotThere(text)
    if error.status == 409:
        return AlreadyThere(text)
    if error.status in (0, 502, 503, 504):
        return NoAnswer(text)
    return VolcanoError(text)
