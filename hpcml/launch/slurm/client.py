"""Calling Slurm's commands."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence


class SlurmError(Exception):
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
    win over the script's own lines. ``SLURM_CONF`` says where the cluster is and stays.
    """
    prefixes = ("SLURM_", "SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCANCEL_")
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(prefixes) or name == "SLURM_CONF"
    }
    # squeue would shorten long lists of array indices.
    return {**kept, "SLURM_BITSTR_LEN": "0", "SLURM_TIME_FORMAT": "standard"}
