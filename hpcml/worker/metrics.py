"""The metrics protocol: one JSON object per line, appended to ``$HPCML_METRICS``."""

import errno
import json
import os
from typing import Optional


def append_line(path: "str | os.PathLike[str]", record: "dict[str, object]") -> None:
    """Append one JSON line with a single write, so that several writers never mix their lines."""
    line = json.dumps(record, ensure_ascii=False, separators=(",", ":")) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        data = line.encode(errors="backslashreplace")
        if os.write(descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    finally:
        os.close(descriptor)


def report(*, step: Optional[int] = None, **metrics: float) -> None:
    """Report metrics of the running cell.

    Args:
        step: the training step the values belong to. A later report for the same step replaces
            the earlier one, key by key.
        metrics: named numbers, for example ``loss=0.5``. ``total_steps`` lets the progress table
            show the time left, ``tokens_per_second`` the speed.

    Outside hpcml (no ``$HPCML_METRICS``) it does nothing, so that a script runs by hand as well.
    Only rank 0 should report.

    Raises:
        TypeError: a value is not a number.
    """
    path = os.environ.get("HPCML_METRICS")
    if not path:
        return
    record: dict[str, object] = {} if step is None else {"step": int(step)}
    for name, value in metrics.items():
        if isinstance(value, str):
            raise TypeError(f"{name} is text ({value!r}); a metric is a number")
        record[name] = value if isinstance(value, int) else float(value)
    append_line(path, record)
