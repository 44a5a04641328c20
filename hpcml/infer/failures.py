"""Why a row has no answer: the causes that outputs and ``merge.json`` name."""

from __future__ import annotations

CAUSES = {
    "malformed": "the line is no row: not JSON, or with another number of fields",
    "invalid_utf8": "the text is not UTF-8",
    "missing": "the template names a column that the row does not have, or its value is null",
    "empty": "the prompt is empty",
    "wrong_type": "a value has another type than is needed",
    "duplicate_key": "an earlier row has the same key",
    "template": "the template failed on this row",
    "unsupported": "the row asks for something that the engine or the batch format cannot do",
    "too_long": "the prompt is longer than the model allows",
    "engine": "the engine refused the row, or failed on it alone",
    "engine_died": "the engine died twice with this row",
}


class RowFailed(Exception):
    """A row has no answer; the others go on.

    Args:
        cause: one of :data:`CAUSES`.
        message: one sentence for a person.
    """

    def __init__(self, cause: str, message: str) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
