"""SGLang: its engine, asked for many rows at once; each comes back when it is ready."""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Sequence
from typing import Any

import sglang
from sglang.srt.server_args import ServerArgs

from hpcml.infer.engine import Answer, EngineConfig, EngineError, Request
from hpcml.infer.engines.prompting import check_arguments, failed, tokens_of

# As many as its server lets run by default on a large device; the rest waits in its own queue.
_LIMIT = 512
_TAKEN = {
    "model_path": "infer.model",
    "tp_size": "params.tensor_parallel_size",
    "pp_size": "params.pipeline_parallel_size",
}
_SPREAD = {"tensor_parallel_size": "tp_size", "pipeline_parallel_size": "pp_size"}
_NAMES = {
    "n": "n", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k",
    "max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "stop": "stop",
    "repetition_penalty": "repetition_penalty", "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty", "regex": "regex", "grammar": "ebnf",
}  # fmt: skip


class SglangEngine:
    """See the module.

    Args:
        config: the model, and arguments of ``sglang.Engine``.
    """

    def __init__(self, config: EngineConfig) -> None:
        known = set(inspect.signature(ServerArgs).parameters)
        check_arguments(config, known, _TAKEN)
        arguments = dict(config.arguments)
        for name, theirs in (
            ("tensor_parallel_size", "tp_size"),
            ("pipeline_parallel_size", "pp_size"),
        ):
            if config.parameters.get(name) is not None:
                arguments[theirs] = config.parameters[name]
        self._adapter = None
        if config.adapter is not None:
            arguments["lora_paths"] = [f"adapter={config.adapter}"]
            self._adapter = "adapter"
        arguments.setdefault("log_level", "warning")
        try:
            self._engine = sglang.Engine(model_path=str(config.model), **arguments)
        except (OSError, ValueError, TypeError) as error:
            raise EngineError(f"SGLang cannot load {config.model}: {error}") from error
        manager = self._engine.tokenizer_manager
        self.limit = 2 * (arguments.get("max_running_requests") or _LIMIT // 2)
        self._tokenizer = manager.tokenizer
        self._longest = manager.model_config.context_len
        self._chat_template = config.chat_template
        self._loop = self._engine.loop
        self._tasks: set[asyncio.Task[Answer]] = set()

    def add(self, requests: Sequence[Request]) -> list[Answer]:
        """Take questions."""
        refused = []
        for request in requests:
            tokens = tokens_of(self._tokenizer, request, self._chat_template, self._longest - 2)
            if isinstance(tokens, Answer):
                refused.append(tokens)
            else:
                self._tasks.add(self._loop.create_task(self._ask(request, tokens)))
        return refused

    def step(self) -> list[Answer]:
        """Wait until at least one row is ready."""
        if not self._tasks:
            return []
        done, self._tasks = self._loop.run_until_complete(
            asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        )
        return [task.result() for task in done]

    async def _ask(self, request: Request, tokens: list[int]) -> Answer:
        begun = time.monotonic()
        wants_logprobs = bool(request.parameters.get("logprobs"))
        try:
            found = await self._engine.async_generate(
                input_ids=tokens,
                sampling_params=_sampling(request),
                return_logprob=wants_logprobs,
                lora_path=self._adapter,
            )
        except (ValueError, TypeError) as error:
            return failed(request, "engine", f"{type(error).__name__}: {error}")
        outputs: list[dict[str, Any]] = found if isinstance(found, list) else [found]
        about = [output["meta_info"] for output in outputs]
        reasons = [(item["finish_reason"] or {}).get("type", "unknown") for item in about]
        if not set(reasons) <= {"stop", "length"}:
            return failed(request, "engine", f"SGLang ended it with {about[0]['finish_reason']}")
        return Answer(
            request.row,
            text=[output["text"] for output in outputs],
            finish_reason=reasons,
            prompt_tokens=len(tokens),
            output_tokens=[item["completion_tokens"] for item in about],
            logprobs=[[entry[0] for entry in item["output_token_logprobs"]] for item in about]
            if wants_logprobs
            else None,
            seconds=time.monotonic() - begun,
        )


def _sampling(request: Request) -> dict[str, Any]:
    parameters = request.parameters
    given = {
        theirs: parameters[name]
        for name, theirs in _NAMES.items()
        if parameters.get(name) is not None
    }
    given["top_k"] = given.get("top_k") or -1  # which is all
    if (schema := parameters.get("json_schema")) is not None:
        given["json_schema"] = schema if isinstance(schema, str) else json.dumps(schema)
    if parameters["temperature"]:
        given["sampling_seed"] = request.seed
    return given


def make(config: EngineConfig) -> SglangEngine:
    """The engine of a configuration."""
    return SglangEngine(config)
