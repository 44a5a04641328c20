"""Which kinds of recipes the Python of this machine can run, without an image."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import hpcml
from hpcml.site.check import Check
from hpcml.site.image_check import NEEDS, lacking, wanted

#: Seconds in which an engine has to be imported. From a slow filesystem torch takes minutes.
LIMIT = 300

#: What of setup.cfg has the packages of a kind.
EXTRAS = {
    "train torch": "torch",
    "train deepspeed": "torch,deepspeed",
    "train megatron": "torch,megatron",
    "infer transformers": "torch",
    "infer vllm": "vllm",
    "infer sglang": "sglang",
}


def check_kinds(python: str, kinds: Sequence[str], *, required: bool) -> Iterator[Check]:
    """Look whether kinds of recipes find what they need, each in a process of its own.

    Args:
        python: the interpreter that runs cells.
        kinds: the kinds, keys of ``NEEDS``.
        required: whether what is missing is a fault.
    """
    with ThreadPoolExecutor(2) as pool:
        yield from pool.map(lambda kind: _check(python, kind, required), kinds)


def _check(python: str, kind: str, required: bool) -> Check:
    need = NEEDS[kind]
    if not need.packages:
        return Check(kind, True, "needs Python alone")
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "HPCML_CELL_DIR": folder,
            "PYTHONPATH": str(Path(hpcml.__file__).resolve().parents[1]),
            "PYTHONNOUSERSITE": "1",
        }
        # Ranks of a job that this command is given in are no concern of the probe.
        environment.pop("RANK", None)
        question = json.dumps({**wanted([kind]), "torch": False})
        try:
            done = subprocess.run(
                [python, "-m", "hpcml.worker.image_probe", question],
                env=environment,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LIMIT,
                check=False,
            )
            report = json.loads(Path(folder, "report.0.json").read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            return Check(kind, False, f"its packages are not imported within {LIMIT} s")
        except FileNotFoundError:
            words = done.stderr.decode(errors="replace").strip().splitlines()
            said = words[-1] if words else f"exit code {done.returncode}"
            return Check(kind, False, f"{python} broke off when it imported them: {said}")
        except OSError as error:
            return Check(kind, False, f"{python}: {error.strerror}")
    lacks, seen = lacking(need, report)
    if not lacks:
        return Check(kind, True, ", ".join(seen))
    where = "" if python == sys.executable else f" (with {python})"
    hint = f"pip install 'hpcml[{EXTRAS[kind]}]'{where}"
    return Check(kind, False if required else None, f"missing: {'; '.join(lacks)}: {hint}")
