"""What `hpcml site check` runs on the nodes of a partition.

It looks at the node, then meets the login node and the other node in files of one folder, which
shows whether the filesystem does what runs rely on. Both sides of a meeting are here. They are
generators that yield while they wait, so that the login node can take part in several at once.
"""

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from typing import Any, Callable, Optional

# How long anything may take to be seen on the other side. NFS remembers for up to a minute that a
# file is not there.
LIMIT = 120.0
TICK = 0.05
AGAIN = 75  # that of codes.py, which is not there: this file goes to the nodes by itself
GPU_VARIABLES = ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "ZE_AFFINITY_MASK")

Wait = Generator[None, None, float]
Meeting = Generator[None, None, "dict[str, Any]"]


class NotSeen(Exception):
    """What should have become visible did not."""


def say(folder: str, name: str, **content: Any) -> None:
    """Make a file of the folder, complete or not at all."""
    path = os.path.join(folder, name)
    write(f"{path}.{os.getpid()}.part", json.dumps(content))
    os.replace(f"{path}.{os.getpid()}.part", path)


def heard(folder: str, name: str) -> "Optional[dict[str, Any]]":
    """What the other side said under this name, or None as long as it has not."""
    try:
        with open(os.path.join(folder, name), encoding="utf-8") as file:
            found: dict[str, Any] = json.load(file)
            return found
    except FileNotFoundError:
        return None


def told(folder: str, name: str) -> Meeting:
    """Wait until the other side has said something, and return it."""
    yield from until(lambda: heard(folder, name) is not None, f"the other side's file `{name}`")
    return heard(folder, name) or {}


def until(condition: "Callable[[], object]", what: str, limit: float = LIMIT) -> Wait:
    """Wait for ``condition``; returns the seconds that it took.

    Raises:
        NotSeen: it did not come true.
    """
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > limit:
            raise NotSeen(f"{what}: not within {limit:.0f} s")
        yield
    return time.monotonic() - began


def first(folder: str) -> Meeting:
    """One side of a meeting: holds the lock, replaces the file, appends the first line."""
    write(os.path.join(folder, "file"), "old")
    append(folder, "first")
    with open(os.path.join(folder, "lock"), "a") as lock:
        error = _lock(lock.fileno())
        say(folder, "held", error=error)
        yield from told(folder, "tried")
        write(os.path.join(folder, "new"), "new")
        os.replace(os.path.join(folder, "new"), os.path.join(folder, "file"))
    say(folder, "replaced")
    yield from told(folder, "appended")
    yield from until(lambda: lines(folder) == ["first", "second"], "a line that it appended")
    return {"append": True}


def second(folder: str) -> Meeting:
    """The other side: must not get the lock while it is held, must see the file replaced.

    Returns:
        ``lock``: None, or what is wrong with it; ``rename``: the seconds until a file that was
        renamed over another was seen.
    """
    held = yield from told(folder, "held")
    path = os.path.join(folder, "file")
    yield from until(lambda: read(path) == "old", "the content of a new file")
    with open(os.path.join(folder, "lock"), "a") as lock:
        wrong = held.get("error")
        if wrong is None:
            answer = _lock(lock.fileno())
            wrong = "two have a lock at once" if answer is None else None
            if answer not in (None, "held"):
                wrong = answer
        say(folder, "tried")
        yield from told(folder, "replaced")
        rename = yield from until(lambda: read(path) == "new", "a file renamed over another")
        if wrong is None:
            yield from until(lambda: _lock(lock.fileno()) is None, "a lock that was given back")
    yield from until(lambda: lines(folder) == ["first"], "a line that was appended")
    append(folder, "second")
    say(folder, "appended")
    return {"lock": wrong, "rename": rename}


def write(path: str, text: str) -> None:
    """Write a file so that others can see it."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def read(path: str) -> Optional[str]:
    """The content of a file; None where there is none."""
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except FileNotFoundError:
        return None


def append(folder: str, line: str) -> None:
    """Append a line to the file that both sides write."""
    with open(os.path.join(folder, "lines"), "a", encoding="utf-8") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())


def lines(folder: str) -> "list[str]":
    """The lines that both sides have written."""
    return (read(os.path.join(folder, "lines")) or "").splitlines()


def _lock(descriptor: int) -> Optional[str]:
    """Take a lock: None when it is taken, ``held`` when another has it, else what went wrong."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return "held"
    except OSError as error:
        return f"flock: {error.strerror}"
    return None


def _drive(generator: "Generator[None, None, Any]") -> Any:
    while True:
        try:
            next(generator)
        except StopIteration as end:
            return end.value
        time.sleep(TICK)


def _look(runtime: str) -> "dict[str, Any]":
    seen: dict[str, Any] = {
        "host": socket.gethostname(),
        "python": sys.version.split()[0],
        "cores": len(os.sched_getaffinity(0)),
        "gpus": {name: os.environ[name] for name in GPU_VARIABLES if os.environ.get(name)},
        "devices": None,
    }
    if shutil.which("nvidia-smi"):
        listed = _output(["nvidia-smi", "-L"])
        seen["devices"] = [line for line in listed[1].splitlines() if line.startswith("GPU ")]
    if runtime:
        seen["runtime"] = list(_output([runtime, "--version"]))
    return seen


def _output(command: "list[str]") -> "tuple[bool, str]":
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
        )
    except (OSError, subprocess.SubprocessError) as error:
        return False, str(error)
    return done.returncode == 0, done.stdout.decode(errors="replace").strip()


def _greet(folder: str, rank: int) -> "dict[str, Any]":
    """Write a file, wait for the login node's answer; the clocks and the time that it took."""
    began = time.time()
    say(folder, f"hello.{rank}")
    reply = _drive(told(folder, f"reply.{rank}"))
    ended = time.time()
    # The answer was written somewhere in between.
    clock = (began + ended) / 2 - reply["time"]
    return {"answer": ended - began, "clock": clock, "uncertain": (ended - began) / 2}


@contextmanager
def _listening(folder: str) -> Iterator[socket.socket]:
    with socket.create_server(("", 0)) as server:
        server.settimeout(LIMIT)
        say(folder, "port", port=server.getsockname()[1])
        yield server


def _connect(folder: str, address: str) -> "dict[str, Any]":
    """Reach the first node as the ranks of a job do: by its name, on a free port."""
    port = _drive(told(folder, "port"))["port"]
    try:
        with socket.create_connection((address, port), timeout=20) as connection:
            began = time.monotonic()
            connection.sendall(b"?")
            connection.recv(1)
            return {"seconds": time.monotonic() - began}
    except OSError as error:
        return {"error": f"{address}, port {port}: {error}"}


def _between_nodes(folder: str, rank: int, address: str) -> "dict[str, Any]":
    place = os.path.join(folder, "nodes")
    if rank:
        return {"meeting": _drive(second(place)), "network": _connect(place, address)}
    with _listening(place) as server:
        found: dict[str, Any] = {"meeting": _drive(first(place))}
        try:
            connection, _ = server.accept()
            with connection:
                connection.sendall(connection.recv(1))
        except OSError:
            pass  # the other side says why
    return found


def main(folder: str, runtime: str) -> int:
    """Look around, meet the others, wait for the signal; 75 asks to be started again."""
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    nodes = int(os.environ.get("HPCML_NODE_COUNT", "1"))
    got: list[int] = []
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, frame: got.append(number))
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        say(folder, f"back.{rank}", host=socket.gethostname())
        return 0
    seen = _look(runtime)
    try:
        seen.update(_greet(folder, rank))
        if rank == 0:
            seen["login"] = _drive(first(os.path.join(folder, "login")))
        if nodes > 1 and rank < 2:
            address = os.environ.get("HPCML_MASTER_ADDR", "")
            seen["nodes"] = _between_nodes(folder, rank, address)
    except (NotSeen, OSError, ValueError) as error:
        seen["error"] = str(error)
    say(folder, f"report.{rank}", **seen)
    try:
        _drive(until(lambda: got, "the signal"))
    except NotSeen:
        return 1
    say(folder, f"signalled.{rank}")
    return AGAIN


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
