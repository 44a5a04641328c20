"""The few routes of a Kubernetes server that hpcml calls, in this process.

It validates jobs strictly by Volcano's schema, as a server does, and refuses queues that are not
there, as Volcano's webhook does. Nothing runs on it: a test says what became of a job.
"""

from __future__ import annotations

import json
import re
import threading
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import yaml

from tests.volcano_schema import problems

Object = dict[str, Any]

_ROUTE = re.compile(
    r"/(?:api/v1|apis/[\w.]+/v1\w+)(?:/namespaces/(?P<namespace>[\w-]+))?"
    r"/(?P<kind>jobs|pods|podgroups|queues)(?:/(?P<name>[\w.-]+))?"
)


class VolcanoServer:
    """A server, and what lies on it by kind and name."""

    def __init__(self, namespace: str = "ml") -> None:
        self.namespace = namespace
        self.objects: dict[str, dict[str, Object]] = {
            kind: {} for kind in ("jobs", "pods", "podgroups", "queues")
        }
        self.objects["queues"]["default"] = {"status": {"state": "Open"}}
        #: Method and path of each call, with its query.
        self.calls: list[str] = []
        #: Answers to the next creations instead of the right ones: a status, or "lost", which
        #: creates the job and then says nothing.
        self.trouble: list[int | str] = []
        #: Kinds that this user may not see.
        self.forbidden: set[str] = set()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()

    def kubeconfig(self, folder: Path) -> Path:
        """A file by which the server is found, as people have one."""
        path = folder / "kubeconfig"
        url = f"http://127.0.0.1:{self._http.server_port}"
        path.write_text(
            yaml.dump(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [{"name": "here", "cluster": {"server": url}}],
                    "users": [{"name": "me", "user": {"token": "a secret"}}],
                    "contexts": [
                        {"name": "here", "context": {"cluster": "here", "user": "me"}},
                        {"name": "nowhere", "context": {"cluster": "gone", "user": "me"}},
                    ],
                    "current-context": "here",
                }
            )
        )
        return path

    # What a test says

    @property
    def jobs(self) -> dict[str, Object]:
        return self.objects["jobs"]

    def phase(self, name: str, phase: str, **counts: int) -> None:
        """What Volcano says of a job."""
        self.jobs[name]["status"] = {"state": {"phase": phase}, **counts}

    def pod(self, name: str, job: str, phase: str, **status: Any) -> Object:
        """A pod as Volcano makes it from a job's template."""
        template = self.jobs[job]["spec"]["tasks"][0]["template"]
        pod = {
            "metadata": {
                "name": name,
                "labels": {**template["metadata"]["labels"], "volcano.sh/job-name": job},
            },
            "spec": {"nodeName": "n1"} if phase != "Pending" else {},
            "status": {"phase": phase, **status},
        }
        self.objects["pods"][name] = pod
        return pod

    # Answers

    def answer(self, method: str, url: str, body: Object | None) -> tuple[int, Object]:
        self.calls.append(f"{method} {url}")
        parts = urlsplit(url)
        query = {key: values[-1] for key, values in parse_qs(parts.query).items()}
        match = _ROUTE.fullmatch(parts.path)
        if match is None or match["namespace"] not in (None, self.namespace):
            return _status(404, "the server could not find the requested resource")
        kind, name = match["kind"], match["name"]
        if kind in self.forbidden:
            return _status(403, f'{kind} is forbidden: User "me" cannot see {kind}')
        if method == "POST":
            assert body is not None
            return self._create(body, query)
        objects = self.objects[kind]
        if name is None:
            return self._list(objects, query)
        if name not in objects:
            return _status(404, f'{kind} "{name}" not found')
        if method == "DELETE":
            del objects[name]
            return 200, {"kind": "Status", "status": "Success"}
        return 200, objects[name]

    def _create(self, job: Object, query: dict[str, str]) -> tuple[int, Object]:
        dry = query.get("dryRun") == "All"
        if self.trouble and not dry:
            trouble = self.trouble.pop(0)
            if trouble == "lost":
                self._keep(job)
                raise ConnectionAbortedError
            return _status(int(trouble), "the server is not well")
        found = problems(job) if query.get("fieldValidation") == "Strict" else []
        if found:
            return _status(400, f"strict decoding error: {'; '.join(found)}")
        name = job["metadata"]["name"]
        if name in self.jobs:
            return _status(409, f'jobs.batch.volcano.sh "{name}" already exists')
        queue = self.objects["queues"].get(job["spec"]["queue"])
        if queue is None:
            return _denied(f"unable to find job queue: {job['spec']['queue']}")
        if queue["status"]["state"] != "Open":
            return _denied("can only submit job to queue with state `Open`")
        if not dry:
            self._keep(job)
        return 201, job

    def _keep(self, job: Object) -> None:
        self.jobs[job["metadata"]["name"]] = {
            **job,
            "metadata": {**job["metadata"], "uid": f"uid-{len(self.calls)}"},
        }

    @staticmethod
    def _list(objects: dict[str, Object], query: dict[str, str]) -> tuple[int, Object]:
        wanted = dict(
            part.split("=", 1) for part in query.get("labelSelector", "").split(",") if part
        )
        items = [
            item
            for item in objects.values()
            if wanted.items() <= item["metadata"].get("labels", {}).items()
        ]
        start, limit = int(query.get("continue", 0)), int(query.get("limit", 500))
        page = items[start : start + limit]
        more = {"continue": str(start + limit)} if start + limit < len(items) else {}
        return 200, {"kind": "List", "metadata": more, "items": page}


def _status(code: int, message: str) -> tuple[int, Object]:
    return code, {"kind": "Status", "status": "Failure", "message": message, "code": code}


def _denied(message: str) -> tuple[int, Object]:
    return _status(400, f'admission webhook "validatejob.volcano.sh" denied the request: {message}')


def _handler(server: VolcanoServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("Content-Length") or 0)
            body = json.loads(self.rfile.read(length)) if length else None
            assert self.headers["Authorization"] == "Bearer a secret"
            try:
                code, content = server.answer(self.command, self.path, body)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            data = json.dumps(content).encode()
            with suppress(BrokenPipeError):
                self.send_response(code)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

        do_GET = do_POST = do_DELETE = _answer  # noqa: N815

        def log_message(self, *arguments: object) -> None:
            pass

    return Handler
