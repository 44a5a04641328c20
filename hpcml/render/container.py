"""The command line that starts the worker inside an image."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hpcml.plan.container import Container
from hpcml.recipe.container import Bind
from hpcml.render.environment import Trusted

# What both forms of a bind take without quoting.
_PLAIN = re.compile(r"[^\s,:\"'\\]+")

# Variables that the worker and its ranks need, as patterns of the shell.
_ALWAYS = ("HPCML_*", "SLURM_*", "*_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK")

# A line of the script: words, each of which is quoted when it is rendered.
Line = Sequence[str]


def prepare(container: Container) -> str | None:
    """Shell that runs on each node and then becomes the container, or None where none is needed.

    Variables are handed over by name and not as words of the command line, where everybody on the
    node could read the secrets among them. They must be taken on the node: srun gives each task
    its own GPUs and ranks. pyxis hands all variables over by itself.
    """
    if container.runtime == "pyxis":
        return None
    prefixes = ["APPTAINERENV_"]
    if container.runtime == "singularity":
        prefixes.append("SINGULARITYENV_")
    exports = " ".join(f'"{prefix}$name=${{!name}}"' for prefix in prefixes)
    return "\n".join(
        [
            "",
            # Otherwise a shell in the container evaluates the values.
            "export APPTAINER_NO_EVAL=1 SINGULARITY_NO_EVAL=1",
            "unset PYTHONHOME",
            "for name in $(compgen -e); do",
            "  case $name in",
            f"    {' | '.join((*_ALWAYS, *container.keep))})",
            f"      export {exports}",
            "      ;;",
            "  esac",
            "done",
            'exec "$@"',
            "",
        ]
    )


def command(container: Container, folder: Path, code: Path) -> list[Line]:
    """The words between ``srun``, if there is one, and the image's Python, line by line.

    Args:
        container: the image and what it sees.
        folder: the run folder, where the worker starts.
        code: the snapshot, for ``PYTHONPATH``.
    """
    lines: list[Line] = []
    if container.runtime != "pyxis":
        gpu = [f"--{container.gpu}"] if container.gpu else []
        lines.append([container.runtime, "exec", *gpu, "--pwd", str(folder)])
        lines += [_apptainer_bind(bind) for bind in container.binds]
        if container.options:
            lines.append([Trusted(option) for option in container.options])
        lines.append([container.image])
    return [*lines, _environment(container, code)]


def srun_options(container: Container, folder: Path) -> list[Line]:
    """What ``srun`` is told for pyxis."""
    mounts = ",".join(
        f"{bind.source}:{bind.destination}{':ro' if bind.read_only else ''}"
        for bind in container.binds
    )
    lines: list[Line] = [
        [f"--container-image={container.image}"],
        [f"--container-mounts={mounts}"],
        [f"--container-workdir={folder}"],
    ]
    if container.keep:  # else the image's own values would win
        lines.append([f"--container-env={','.join(container.keep)}"])
    if container.options:
        lines.append([Trusted(option) for option in container.options])
    return lines


def _environment(container: Container, code: Path) -> Line:
    """``env`` within the image: nothing that the image or the runtime sets comes after it."""
    variables = dict(container.env)
    path = variables.pop("PYTHONPATH", "")
    return [
        "env",
        f"PYTHONPATH={code}{':' + path if path else ''}",
        # Packages in ~/.local are for another Python.
        "PYTHONNOUSERSITE=1",
        *(f"{name}={value}" for name, value in variables.items()),
    ]


def _apptainer_bind(bind: Bind) -> Line:
    """The short form where it will do, since old versions know no other; else with quotes."""
    source, destination, read_only = bind
    if _PLAIN.fullmatch(source) and _PLAIN.fullmatch(destination):
        short = source if source == destination and not read_only else f"{source}:{destination}"
        return ["--bind", f"{short}:ro" if read_only else short]
    fields = [f"source={source}", f"destination={destination}"]
    quoted = ['"' + field.replace('"', '""') + '"' for field in fields]
    return ["--mount", ",".join(["type=bind", *quoted, *(["ro"] if read_only else [])])]
