"""What determines an answer, as digests."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpcml.infer.job import InferenceError, InferenceJob
from hpcml.infer.source import input_files

_WHOLE_UP_TO = 64 * 1024**2
_SAMPLES = 32
_SAMPLE_BYTES = 1024**2


def of_folder(folder: Path) -> str:
    """Digest of the content of a model's folder, 16 hexadecimal digits; see :func:`of_files`.

    Raises:
        InferenceError: there is no such folder, or it cannot be read.
    """
    names = sorted(_files(folder))
    if not names:
        raise InferenceError(f"there is no model in {folder}")
    return of_files([str(folder / name) for name in names], str(folder))


def of_files(paths: list[str], start: str = "/") -> str:
    """Digest of the content of files, and of their names from ``start`` on.

    Files of up to 64 MiB count whole; of larger ones, the size and 32 samples of 1 MiB spread over
    them: training changes weights everywhere, and reading all of a large model takes long.

    Raises:
        InferenceError: one cannot be read.
    """
    digest = hashlib.sha256()
    try:
        for path in paths:
            size = os.stat(path).st_size
            name = os.path.relpath(path, start)
            digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape"))
            with open(path, "rb") as file:
                if size <= _WHOLE_UP_TO:
                    while block := file.read(_SAMPLE_BYTES):
                        digest.update(block)
                    continue
                for sample in range(_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * sample // (_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise InferenceError(f"cannot read {error.filename}: {error.strerror}") from error
    return digest.hexdigest()[:16]


def quick(paths: list[str] | list[Path]) -> str:
    """Digest of the names, sizes and times of files: equal as long as nobody touches them."""
    digest = hashlib.sha256()
    for path in paths:
        try:
            found = os.stat(path)
        except OSError as error:
            raise InferenceError(f"cannot read {path}: {error.strerror}") from error
        digest.update(f"{path}\0{found.st_size}\0{found.st_mtime_ns}\0".encode())
    return digest.hexdigest()[:16]


def stamps(job: InferenceJob) -> dict[str, str]:
    """What tells quickly whether model, adapter or input changed since they were looked at."""
    found = {
        "input": quick(input_files(job.input)),
        "model": quick([job.model / name for name in sorted(_files(job.model))]),
    }
    if job.adapter is not None:
        found["adapter"] = quick([job.adapter / name for name in sorted(_files(job.adapter))])
    return found


def of_job(job: InferenceJob) -> dict[str, str]:
    """Digests of all but the rows that determines answers: model, adapter, settings."""
    settings = {
        "engine": job.engine,
        "parameters": {name: value for name, value in job.parameters.items() if value is not None},
        "arguments": dict(job.arguments),
        "chat_template": job.chat_template,
    }
    found = {"model": of_folder(job.model), "settings": _short(settings)}
    if job.adapter is not None:
        found["adapter"] = of_folder(job.adapter)
    return found


def changes(job: InferenceJob, digests: dict[str, str], source: str) -> list[str]:
    """What is another than it was, in words.

    Args:
        job: as it is now.
        digests: as :func:`of_job` was.
        source: as :func:`of_files` of the input was.
    """
    now = of_job(job)
    words = {"model": "the model", "adapter": "the adapter", "settings": "the parameters"}
    found = [words[name] for name in words if now.get(name) != digests.get(name)]
    if of_files(input_files(job.input)) != source:
        found.append("the input")
    return found


def combined(parts: dict[str, str]) -> str:
    """One digest of several."""
    return _short(parts)


def _short(content: Any) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _files(folder: Path) -> Iterator[str]:
    for parent, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in names:
            if not name.startswith("."):
                yield os.path.relpath(os.path.join(parent, name), folder)
