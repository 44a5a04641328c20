"""Why a job waits, in words."""

from __future__ import annotations

from functools import lru_cache

# Slurm's reason codes (squeue(1), JOB REASON CODES): what they mean for who waits.
_WORDS = {
    "None": "waits to be looked at by the scheduler",
    "Priority": "waits for jobs of higher priority",
    "Resources": "waits for nodes to become free",
    "Dependency": "waits for the job before it",
    "DependencyNeverSatisfied": "will never start: a job that it depends on did not succeed",
    "BeginTime": "waits for its time; after a requeue Slurm lets up to two minutes pass",
    "JobArrayTaskLimit": "waits for other cells, since array.max_running are running",
    "JobHeldUser": "is held; `scontrol release {job}` lets it go",
    "JobHeldAdmin": "is held by an administrator, who alone can release it",
    "job requeued in held state": "is held: somebody requeued it so, or a rule of the cluster did; "
    "`scontrol release {job}` lets it go",
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
    "launch failed requeued held": "is held: its node could not start it",
    "JobHoldMaxRequeue": "is held: nodes could not start it, again and again",
    "JobLaunchFailure": "the node could not start it",
}

# One state in several words, as versions of Slurm and ways into it have them.
_SAME = {
    "launch failure limit exceeded requeued held": "JobHoldMaxRequeue",
    "job requeued in special exit state": "job requeued in held state",
}
# slurmd could not start the job, at once or so often that Slurm has given up.
_LAUNCH_FAILED = frozenset(("launch failed requeued held", "JobHoldMaxRequeue"))
# Words of reasons that no time will change.
_STUCK = ("is held", "will never start")


@lru_cache
def words(reason: str, job: int | str) -> str:
    """The reason squeue gives for a task of ``job``, for a person."""
    code = _code(reason)
    if code in _WORDS:
        return _WORDS[code].format(job=job)
    if code.startswith(("QOS", "Assoc")):
        # QOSMaxCpuPerJobLimit can never be met, QOSGrpCpuLimit can, once others end.
        if "PerJob" in code:
            return f"will never start: it asks for more than a limit allows ({code})"
        return f"waits: a limit of the account or quality of service is reached ({code})"
    return f"waits ({reason})" if reason else "waits"


@lru_cache
def launch_failed(reason: str) -> bool:
    """Whether Slurm holds a job only because it could not be started."""
    return _code(reason) in _LAUNCH_FAILED


def is_stuck(why: str) -> bool:
    """Whether somebody has to do something about what :func:`words` says."""
    return why.startswith(_STUCK)


def _code(reason: str) -> str:
    """The first of the reasons, without what may follow: a list of nodes."""
    code = reason.strip("().").split(",", 1)[0].strip().replace("_", " ")
    return _SAME.get(code, code)


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
