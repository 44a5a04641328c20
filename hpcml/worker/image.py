"""``python -m hpcml.worker.image RUNTIME SOURCE TARGET``: make the file of an image on a node.

SOURCE is a definition (``name.def``), which is built, or a reference such as
``docker://registry/name:tag``, which is fetched. The file gets its name when it is whole, so that
whatever has the name is an image, and one process at a time makes it.
"""

import fcntl
import glob
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager

from hpcml.worker.codes import AGAIN
from hpcml.worker.flush import flush_folder
from hpcml.worker.processes import die_with_parent, kill_group


class Busy(Exception):
    """Somebody else is making the image; the message says who."""


def main(runtime: str, source: str, target: str) -> int:
    """Exit code: 0 the image is there, 75 asked to stop, 1 there is none."""
    folder, name = os.path.split(target)
    try:
        os.makedirs(folder, exist_ok=True)
        with only_maker(os.path.join(folder, f".{name}.lock")):
            # What a killed job has left: nobody else is at it, since the lock is ours.
            for left in glob.glob(glob.escape(os.path.join(folder, f".{name}.")) + "*.part"):
                os.unlink(left)
            part = os.path.join(folder, f".{name}.{os.getpid()}.part")
            try:
                code = make(runtime, source, part, folder)
                if code:
                    return code
                publish(part, target)
            finally:
                if os.path.exists(part):
                    os.unlink(part)
    except Busy as error:
        print(f"hpcml: {target}: {error}; wait for it, or end it", file=sys.stderr)
        return 1
    except OSError as error:
        print(f"hpcml: {error.filename or target}: {error.strerror}", file=sys.stderr)
        return 1
    print(f"hpcml: {target} is there, {os.path.getsize(target) / 2**20:,.0f} MiB", file=sys.stderr)
    return 0


@contextmanager
def only_maker(path: str) -> "Iterator[None]":
    """Hold the lock of an image; it ends with this process, and with what has inherited it.

    Raises:
        Busy: another process has it.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.read(descriptor, 200).decode(errors="replace").strip()
            raise Busy(f"it is being made already by {owner or 'another process'}") from None
        os.ftruncate(descriptor, 0)
        since = time.strftime("%Y-%m-%d %H:%M")
        words = f"process {os.getpid()} on {socket.gethostname()} since {since}"
        os.pwrite(descriptor, words.encode(), 0)
        # What builds goes on for a moment when this process is killed; it must keep others out.
        os.set_inheritable(descriptor, True)
        yield
    finally:
        os.close(descriptor)


def make(runtime: str, source: str, part: str, folder: str) -> int:
    """Run the program that makes the image; returns the exit code of this one."""
    words = command(runtime, source, part)
    with tempfile.TemporaryDirectory(prefix="image-") as scratch:
        environment = {**os.environ, **places(scratch, folder)}
        print("hpcml: " + " ".join(words), file=sys.stderr, flush=True)
        try:
            process = subprocess.Popen(
                words,
                env=environment,
                stdin=subprocess.DEVNULL,
                close_fds=False,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except FileNotFoundError:
            print(f"hpcml: there is no {words[0]} on {socket.gethostname()}", file=sys.stderr)
            return 1
        asked = []

        def stop(number: int, _: object) -> None:
            asked.append(number)
            kill_group(process.pid)

        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, stop)
        code = process.wait()
    if asked:
        print(
            "hpcml: asked to stop; the image is made from the beginning next time", file=sys.stderr
        )
        return AGAIN
    if code or not os.path.exists(part):
        print(
            f"hpcml: {words[0]} ended with exit code {code}, and there is no image", file=sys.stderr
        )
        return 1
    return 0


def command(runtime: str, source: str, part: str) -> "list[str]":
    """The program and its arguments."""
    if runtime == "enroot":
        return ["enroot", "import", "--output", part, source]
    # Apptainer finds out by itself how somebody who is not root can build.
    fakeroot = ["--fakeroot"] if runtime == "singularity" and source.endswith(".def") else []
    return [runtime, "build", *(fakeroot if os.geteuid() else []), part, source]


def places(scratch: str, folder: str) -> "dict[str, str]":
    """Where the files lie that are made on the way, unless the site's environment says so.

    A home folder, which is the programs' own choice for their caches, is mostly too small for
    them. What has been fetched is kept beside the images, where there is room for such files: the
    next image may begin with the same layers.
    """
    cache = os.path.join(folder, f".cache-{os.getuid()}")
    chosen = {
        "APPTAINER_TMPDIR": scratch,
        "APPTAINER_CACHEDIR": cache,
        "SINGULARITY_TMPDIR": scratch,
        "SINGULARITY_CACHEDIR": cache,
        "ENROOT_TEMP_PATH": scratch,
        "ENROOT_CACHE_PATH": cache,
    }
    found = {name: value for name, value in chosen.items() if name not in os.environ}
    for name in found:
        os.makedirs(found[name], exist_ok=True)
    return found


def publish(part: str, target: str) -> None:
    """Give the image its name, when all of it is on the disk."""
    with open(part, "rb") as file:
        os.fsync(file.fileno())
    os.replace(part, target)
    flush_folder(os.path.dirname(target))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
