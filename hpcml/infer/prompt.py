"""From a row to what the engine is asked."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jinja2 import StrictUndefined, TemplateError, UndefinedError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from hpcml.infer import openai
from hpcml.infer.failures import RowFailed
from hpcml.infer.job import InferenceError, InferenceJob

Messages = list[dict[str, Any]]


@dataclass(frozen=True)
class Prompt:
    """What a row asks.

    Attributes:
        text: the prompt, or the messages of a chat as JSON.
        is_chat: which of the two.
        parameters: generation parameters of this row alone, by canonical name.
    """

    text: str
    is_chat: bool = False
    parameters: Mapping[str, Any] | None = None

    @property
    def messages(self) -> Messages:
        """The messages of a chat."""
        messages: Messages = json.loads(self.text)
        return messages


class _Environment(ImmutableSandboxedEnvironment):
    """A recipe's text can look at a row, and at nothing else; null is no text."""

    def __init__(self) -> None:
        super().__init__(undefined=StrictUndefined, keep_trailing_newline=True, finalize=_not_null)


def _not_null(value: Any) -> Any:
    if value is None:
        raise RowFailed("missing", "a value that the template names is null")
    return value


class PromptMaker:
    """Makes the prompts of a job.

    Args:
        job: with its templates.

    Raises:
        InferenceError: a template is none.
    """

    def __init__(self, job: InferenceJob) -> None:
        self._job = job
        environment = _Environment()
        try:
            self._prompt = None if job.prompt is None else environment.from_string(job.prompt)
            self._system = None if job.system is None else environment.from_string(job.system)
        except TemplateError as error:
            raise InferenceError(f"infer.prompt or infer.system is no template: {error}") from error

    def prompt(self, columns: Mapping[str, Any]) -> Prompt:
        """The prompt of a row.

        Raises:
            RowFailed: the row has none.
        """
        job = self._job
        if job.input.format == "openai":
            return _of_batch(columns, job.engine)
        if job.messages is not None:
            if columns.get(job.messages) is None:
                raise RowFailed("missing", f"there is no column {job.messages}, or it is null")
            return Prompt(_chat(columns[job.messages]), is_chat=True)
        assert self._prompt is not None
        text = _rendered(self._prompt, columns)
        if not text.strip():
            raise RowFailed("empty", "the prompt is empty")
        if not job.chat:
            return Prompt(text)
        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": _rendered(self._system, columns)})
        return Prompt(json.dumps(messages, ensure_ascii=False), is_chat=True)


def _rendered(template: Any, columns: Mapping[str, Any]) -> str:
    try:
        text: str = template.render(columns)
        text.encode()
    except UndefinedError as error:
        raise RowFailed("missing", str(error)) from None
    except UnicodeEncodeError:
        raise RowFailed("invalid_utf8", "the prompt holds lone surrogates") from None
    except RowFailed:
        raise
    except Exception as error:  # noqa: BLE001
        # Whatever the template does with the row's values: it is this row that fails.
        raise RowFailed("template", f"{type(error).__name__}: {error}") from None
    return text


def _chat(value: Any) -> str:
    """Messages as JSON, checked."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise RowFailed("wrong_type", "the messages are no JSON") from None
    if not isinstance(value, list) or not all(isinstance(message, dict) for message in value):
        raise RowFailed("wrong_type", "messages are a list of {role, content}")
    if not value:
        raise RowFailed("empty", "there are no messages")
    for message in value:
        if not isinstance(message.get("role"), str) or "content" not in message:
            raise RowFailed("wrong_type", "each message has a role and a content")
    if not any(message["content"] for message in value):
        raise RowFailed("empty", "all messages are empty")
    text = json.dumps(value, ensure_ascii=False)
    try:
        text.encode()
    except UnicodeEncodeError:
        raise RowFailed("invalid_utf8", "the messages hold lone surrogates") from None
    return text


def _of_batch(columns: Mapping[str, Any], engine: str) -> Prompt:
    prompt, messages, parameters = openai.request(columns, engine)
    if messages is not None:
        return Prompt(_chat(messages), is_chat=True, parameters=parameters)
    assert prompt is not None
    if not prompt.strip():
        raise RowFailed("empty", "the prompt is empty")
    return Prompt(prompt, parameters=parameters)
