"""Why a job waits, in words."""

from __future__ import annotations

# Slurm's reason codes (squeue(1), JOB REASON CODES): what they mean for who waits.
_WORDS = {
    "None": "waits to be looked at by the scheduler",
    "Priority": "waits for jobs of higher priority",
    "Resources": "waits for nodes to become free",
    "Dependency": "waits for the job before it",
    "DependencyNeverSatisfied": "will never start: a job that it depends on did not succeed",
    "BeginTime": "waits for its time; after a requeue Slurm lets up to two minutes pass",
    "JobArrayTaskLimit": "waits for other cells, since array.max_running are running",
    "JobHeldUser": "is held; scontrol release lets it go",
    "JobHeldAdmin": "is held by an administrator",
    "PartitionDown": "waits: its partition is down",
    "PartitionInactive": "waits: its partition is inactive",
    "PartitionNodeLimit": "will never start: it asks for more nodes than the partition allows",
    "PartitionTimeLimit": "will never start: it asks for more time than the partition allows",
    "ReqNodeNotAvail": "waits for nodes that are down, drained or reserved",
    "BadConstraints": "will never start: no node has what it asks for",
    "InvalidAccount": "will never start: its account is not valid",
    "InvalidQOS": "will never start: its quality of service is not valid",
    "Licenses": "waits for a licence",
    "Reservation": "waits for its reservation to begin",
    "launch failed requeued held": "is held: the node could not start it; scontrol release retries",
    "JobLaunchFailure": "the node could not start it",
}

_NEVER = ("Max", "Min")


def words(reason: str) -> str:
    """The reason squeue gives, for a person."""
    code = reason.strip("()").split(",", 1)[0].strip()
    if code in _WORDS:
        return _WORDS[code]
    if code.startswith(("QOS", "Assoc")):
        # QOSMaxCpuPerJobLimit can never be met, QOSGrpCpuLimit can, once others end.
        if "PerJob" in code:
            return f"will never start: it asks for more than a limit allows ({code})"
        return f"waits: a limit of the account or quality of service is reached ({code})"
    return f"waits ({reason})" if reason else "waits"


# How Slurm says that a job ended, for those whose worker could not say it.
_ENDS = {
    "BOOT_FAIL": "could not start: its node did not boot",
    "CANCELLED": "was cancelled in Slurm",
    "COMPLETED": "ended",
    "DEADLINE": "did not end before its deadline",
    "FAILED": "failed",
    "NODE_FAIL": "lost its node",
    "OUT_OF_MEMORY": "ran out of memory",
    "PREEMPTED": "was preempted",
    "TIMEOUT": "was ended at its time limit",
}


def end_words(state: str) -> str:
    """The state that sacct gives a job that has ended, for a person."""
    return f"its job {_ENDS.get(state, f'ended as {state}')}"
