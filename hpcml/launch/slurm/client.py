"""Calling Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from hpcml.launch.cluster import SchedulerError

# Slurm's commands, its daemons and its plugins; the last are handed on by variables with a _.
_OF_SLURM = (
    "SLURM",
    "_SLURM",
    "SALLOC_",
    "SBATCH_",
    "SCANCEL_",
    "SCONTROL_",
    "SINFO_",
    "SACCT_",
    "SQUEUE_",
    "SRUN_",
)
_WHERE = frozenset(("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"))

# What a cell finds in its environment, and what Slurm gives its job beside.
_OF_CELL = frozenset(
    (
        *("HPCML_RUN_DIR", "HPCML_CELL_DIR", "HPCML_CELL_ID", "HPCML_CELL_INDEX"),
        *("HPCML_ATTEMPT", "HPCML_METRICS", "HPCML_STOP_FILE", "HPCML_CHECKPOINTS"),
        *("HPCML_DATA_ROOT", "HPCML_JOB_ID", "HPCML_PYTHON", "HPCML_RUNG", "HPCML_STEPS"),
        *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS"),
        *("TMPDIR", "XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR"),
        *("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL"),
        "ZE_AFFINITY_MASK",
    )
)


class SlurmError(SchedulerError):
    """A command of Slurm failed; the message is what it said."""


class NoAnswer(SlurmError):
    """The controller did not answer in time; it may have done what it was asked all the same."""


def run(command: Sequence[str], timeout: float = 120.0, keep: Sequence[int] = ()) -> str:
    """What ``command`` prints on stdout.

    Args:
        command: the program and its arguments.
        timeout: seconds.
        keep: descriptors that it inherits.

    Raises:
        SlurmError: it is missing, took too long, or failed.
    """
    try:
        result = subprocess.run(
            command,
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            check=False,
            pass_fds=keep,
        )
    except FileNotFoundError:
        raise SlurmError(f"there is no command {command[0]} on this machine") from None
    except OSError as error:
        raise SlurmError(f"cannot run {command[0]}: {error.strerror}") from None
    except subprocess.TimeoutExpired:
        raise NoAnswer(f"{command[0]} gave no answer in {timeout:.0f} s") from None
    if result.returncode:
        said = (result.stderr or result.stdout).strip()
        kind = NoAnswer if "timed out" in said.lower() else SlurmError
        raise kind(f"{command[0]}: {said or f'exit code {result.returncode}'}")
    return result.stdout


def environment() -> dict[str, str]:
    """This process's environment without what an outer job or a habit would add to a submission.

    Inside a job, or in a shell with defaults such as ``SBATCH_PARTITION``, the variables would
    win over the script's own lines. Those that say where the cluster is, and who asks, stay. In a
    cell, what its worker set is left out, too: it is about that cell, and a process that has it is
    ended with the cell.
    """
    left_out = _OF_CELL if "HPCML_CELL_DIR" in os.environ else frozenset[str]()
    kept = {
        name: value
        for name, value in os.environ.items()
        if (not name.startswith(_OF_SLURM) or name in _WHERE) and name not in left_out
    }
    if left_out:
        # The code of the cell would come before that of the run that is submitted.
        code = f"{os.environ['HPCML_RUN_DIR']}/code/"
        path = kept.get("PYTHONPATH", "").split(":")
        kept["PYTHONPATH"] = ":".join(part for part in path if not part.startswith(code))
    # squeue would shorten long lists of array indices.
    return {**kept, "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
