"""Exit codes by which a payload and a task say what is to be done with them."""

AGAIN = 75
"""Saved; run me again (``EX_TEMPFAIL`` of sysexits.h)."""

BROKEN = 70
"""A fault of the worker itself (``EX_SOFTWARE``)."""

OUT_OF_MEMORY = 71
"""Too little memory, of a GPU or of the machine (``EX_OSERR``); `retry.oom` counts it."""

CANNOT_WRITE = 74
"""The run folder cannot be read or written (``EX_IOERR``)."""
