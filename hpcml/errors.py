"""The one exception that means: the user can fix this."""

from __future__ import annotations


class UserError(Exception):
    """A mistake in the user's input or environment.

    The command line prints the message as it is, without a traceback, and exits with code 2.
    The message says what is wrong, where (file, line, key), what is allowed and what to do.
    """
