"""The lines of an OpenAI batch file: what they ask, and how the answers are written.

The format is that of https://platform.openai.com/docs/guides/batch, for the endpoints
``/v1/chat/completions`` and ``/v1/completions``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hpcml.infer.failures import RowFailed

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"

# Field of a body: parameter, and the types that its value may have.
_FIELDS: Mapping[str, tuple[str, tuple[type, ...]]] = {
    "temperature": ("temperature", (int, float)),
    "top_p": ("top_p", (int, float)),
    "max_tokens": ("max_tokens", (int,)),
    "max_completion_tokens": ("max_tokens", (int,)),
    "n": ("n", (int,)),
    "seed": ("seed", (int,)),
    "stop": ("stop", (str, list)),
    "presence_penalty": ("presence_penalty", (int, float)),
    "frequency_penalty": ("frequency_penalty", (int, float)),
    "logprobs": ("logprobs", (bool,)),
}
# Whose value None, False or the like asks for nothing.
_HARMLESS = {"model", "messages", "prompt", "user", "metadata", "store"}
_PENALTIES = ("presence_penalty", "frequency_penalty")


def request(
    columns: Mapping[str, Any], engine: str
) -> tuple[str | None, Any | None, dict[str, Any]]:
    """What a line asks: a prompt or messages, and its own parameters by canonical name.

    Raises:
        RowFailed: the line asks for something else.
    """
    if columns.get("method", "POST") != "POST":
        raise RowFailed("unsupported", f"the method is {columns['method']!r}, not POST")
    url, body = columns.get("url"), columns.get("body")
    if url not in (CHAT, TEXT):
        raise RowFailed("unsupported", f"the url is {url!r}; known are {CHAT} and {TEXT}")
    if not isinstance(body, dict):
        raise RowFailed("wrong_type", "the body is no JSON object")
    parameters = {}
    for name, value in body.items():
        if name in _HARMLESS or value is None or value is False:
            continue
        if name == "response_format":
            parameters.update(_format(value, engine))
            continue
        if name not in _FIELDS:
            raise RowFailed("unsupported", f"the body has {name}, which hpcml does not know")
        canonical, types = _FIELDS[name]
        if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
            raise RowFailed("wrong_type", f"{name} is {value!r}")
        if name == "stop" and isinstance(value, str):
            value = [value]
        if name in _PENALTIES and engine == "transformers":
            raise RowFailed("unsupported", f"the engine transformers has no {name}")
        parameters[canonical] = value
    if url == CHAT:
        if body.get("messages") is None:
            raise RowFailed("missing", "the body has no messages")
        return None, body["messages"], parameters
    if not isinstance(body.get("prompt"), str):
        raise RowFailed("wrong_type", "the body has no prompt, or one that is no text")
    return body["prompt"], None, parameters


def _format(value: Any, engine: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise RowFailed("wrong_type", "response_format is no JSON object")
    kind = value.get("type")
    if kind == "text":
        return {}
    schema = value.get("json_schema")
    if kind != "json_schema" or not isinstance(schema, dict) or "schema" not in schema:
        raise RowFailed("unsupported", f"response_format is {kind!r}; known is json_schema")
    if engine == "transformers":
        raise RowFailed("unsupported", "the engine transformers has no structured output")
    return {"json_schema": schema["schema"]}


def result(record: Mapping[str, Any], *, is_chat: bool, model: str) -> dict[str, Any]:
    """The line that answers a row.

    Args:
        record: the row's answer, as in the Parquet output.
        is_chat: which endpoint it was for.
        model: what the answer says that it is from.
    """
    line: dict[str, Any] = {
        "id": f"batch_req_{record['row']}",
        "custom_id": record["key"],
        "response": None,
        "error": None,
    }
    if record["cause"] is not None:
        line["error"] = {"code": record["cause"], "message": record["error"]}
        return line
    choices = []
    for index, text in enumerate(record["text"]):
        choice: dict[str, Any] = {"index": index, "finish_reason": record["finish_reason"][index]}
        if is_chat:
            choice["message"] = {"role": "assistant", "content": text}
        else:
            choice["text"] = text
        choices.append(choice)
    prompt, answer = record["prompt_tokens"], sum(record["output_tokens"])
    line["response"] = {
        "status_code": 200,
        "request_id": f"req_{record['row']}",
        "body": {
            "id": f"cmpl-{record['row']}",
            "object": "chat.completion" if is_chat else "text_completion",
            "model": model,
            "choices": choices,
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": answer,
                "total_tokens": prompt + answer,
            },
        },
    }
    return line
