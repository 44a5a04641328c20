"""Exit codes by which a payload and a task say what is to be done with them."""

AGAIN = 75
"""Saved; run me again (``EX_TEMPFAIL`` of sysexits.h)."""

BROKEN = 70
"""A fault of the worker itself (``EX_SOFTWARE``)."""
