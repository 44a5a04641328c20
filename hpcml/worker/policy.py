"""What happens after an attempt: decided from the events of the cell, by cause."""

from typing import Any, NamedTuple, Optional

# Causes whose attempts `retry` gives a budget for.
RETRIED = ("application", "oom", "killed")


class Decision(NamedTuple):
    """``again``: another attempt. ``cause`` and ``reason`` replace the attempt's where set."""

    again: bool
    cause: Optional[str] = None
    reason: Optional[str] = None


def of_submission(events: "list[dict[str, Any]]", submission: int) -> "list[dict[str, Any]]":
    """The events since the first attempt of ``submission``: what its budgets count."""
    for position, event in enumerate(events):
        if event.get("event") == "started" and event.get("submission") == submission:
            return events[position:]
    return []


def decide(
    cause: str, progressed: bool, events: "list[dict[str, Any]]", retry: "dict[str, int]"
) -> Decision:
    """Whether the cell gets another attempt after one that ended with ``cause``.

    Args:
        cause: how the attempt ended.
        progressed: whether it got further than the attempts before it.
        events: the events of this submission before the attempt ended.
        retry: budgets for the causes in ``RETRIED``.
    """
    earlier = [event for event in events if event.get("event") == "ended"]
    if cause == "stopped":
        before = earlier[-1] if earlier else {}
        if not progressed and before.get("cause") == "stopped" and not before.get("progress"):
            return Decision(
                again=False,
                cause="no_progress",
                reason="two attempts in a row were stopped without getting further; give the cell "
                "more time per attempt, or save more often",
            )
        return Decision(again=True)
    if cause in RETRIED:
        used = sum(event["cause"] == cause for event in earlier)
        return Decision(again=used < retry.get(cause, 0))
    return Decision(again=False)


def finished(events: "list[dict[str, Any]]", submission: int, retry: "dict[str, int]") -> bool:
    """Whether a submission is through with a cell that is not done.

    A job may begin again after its cell has failed: because another cell of the same task is not
    done, as the next link of a chain, or because its node died in that moment.
    """
    mine = [event for event in of_submission(events, submission) if "attempt" in event]
    ended = [event for event in mine if event.get("event") == "ended"]
    if not ended or mine[-1] is not ended[-1] or ended[-1].get("cause") == "stopped":
        return False
    cause = ended[-1].get("cause")
    failures = [event for event in ended if event.get("cause") == cause]
    return len(failures) > retry.get(str(cause), 0)
