"""``python -m hpcml.worker.image_probe WANTED``: what an image has; runs in it, once for each rank.

WANTED is JSON: ``packages``, names of distributions with the modules that they are imported as;
``modules``, what else has to be imported; ``torch``, whether processes are to add a number up.
Each rank leaves ``report.<rank>.json`` in the cell's folder.
"""

import contextlib
import datetime
import importlib
import importlib.metadata
import json
import os
import platform
import site
import socket
import sys
import time
from typing import Any, Optional

#: Seconds in which all processes have to have met, and added up.
LIMIT = 120


def main(wanted: str) -> int:
    """Exit code 0: there is a report, whatever it says."""
    given = json.loads(wanted)
    rank = int(os.environ.get("RANK", "0"))
    report: dict[str, Any] = {"rank": rank, "host": socket.gethostname()}
    if given["torch"]:
        report["torch"] = torch_of()
        report["sum"] = added_up(report["torch"])
    if rank == 0:
        report.update(surroundings())
        report["packages"] = {
            name: package(name, module) for name, module in given["packages"].items()
        }
        report["modules"] = {name: error_of_import(name) for name in given["modules"]}
    path = os.path.join(os.environ["HPCML_CELL_DIR"], f"report.{rank}.json")
    with open(f"{path}.part", "w", encoding="utf-8") as file:
        json.dump(report, file)
    os.replace(f"{path}.part", path)
    return 0


def surroundings() -> "dict[str, Any]":
    """Python, and what the image sees of the machine."""
    user = site.getusersitepackages()
    return {
        "python": platform.python_version(),
        "executable": sys.executable,
        "libc": "-".join(platform.libc_ver()),
        "user_packages": [path for path in sys.path if path == user],
        "shared_memory": shared_memory(),
    }


def shared_memory() -> "Optional[int]":
    """Size of /dev/shm in bytes; None where there is none."""
    try:
        found = os.statvfs("/dev/shm")
    except OSError:
        return None
    return found.f_blocks * found.f_frsize


def package(name: str, module: str) -> "dict[str, Any]":
    """Version of a distribution, and why it can't be imported if it can't."""
    error = error_of_import(module)
    version = None
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        version = importlib.metadata.version(name)
    if version is None and error is None:
        # A distribution of another name, such as one that is built for CPUs.
        version = getattr(sys.modules[module], "__version__", None)
    return {"version": version, "error": error}


def error_of_import(module: str) -> "Optional[str]":
    """Why a module can't be imported; None where it can."""
    try:
        importlib.import_module(module)
    except BaseException as error:  # noqa: BLE001 - also what a library's start-up code does
        return f"{type(error).__name__}: {error}"
    return None


def torch_of() -> "dict[str, Any]":
    """What torch says of itself and of the GPUs."""
    try:
        import torch
    except BaseException as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"}
    found: dict[str, Any] = {
        "version": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "gpus": [],
        "nccl": None,
    }
    try:
        if torch.cuda.is_available():
            count = torch.cuda.device_count()
            found["gpus"] = [torch.cuda.get_device_name(device) for device in range(count)]
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    except BaseException as error:  # noqa: BLE001 - a driver that is too old, for example
        found["gpu_error"] = f"{type(error).__name__}: {error}"
    return found


def added_up(found: "dict[str, Any]") -> "Optional[dict[str, Any]]":
    """Let all processes add their numbers up: on their GPUs by NCCL, without GPUs by gloo."""
    if "error" in found:
        return None
    import torch
    import torch.distributed as dist

    backend = "nccl" if found["gpus"] else "gloo"
    answer: dict[str, Any] = {"backend": backend, "processes": int(os.environ["WORLD_SIZE"])}
    began = time.monotonic()
    try:
        device = torch.device("cpu")
        if backend == "nccl":
            os.environ.setdefault("TORCH_NCCL_BLOCKING_WAIT", "1")
            device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % len(found["gpus"]))
            torch.cuda.set_device(device)
        dist.init_process_group(backend, timeout=datetime.timedelta(seconds=LIMIT))
        number = torch.full((1 << 20,), float(dist.get_rank() + 1), device=device)
        dist.all_reduce(number)
        count = dist.get_world_size()
        answer["right"] = bool((number == count * (count + 1) / 2).all())
        dist.destroy_process_group()
    except BaseException as error:  # noqa: BLE001
        answer["error"] = f"{type(error).__name__}: {error}"
    answer["seconds"] = time.monotonic() - began
    return answer


if __name__ == "__main__":
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # threads of torch's process groups abort an orderly end now and then
