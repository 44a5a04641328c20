"""vLLM: its engine's own loop, kept full, so that no batch waits for its slowest row."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Sequence
from typing import Any

from vllm import EngineArgs, LLMEngine, SamplingParams, TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.lora.request import LoRARequest
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.v1.engine.exceptions import EngineDeadError

from hpcml.infer.engine import Answer, EngineConfig, EngineError, Request
from hpcml.infer.engines.prompting import check_arguments, failed, tokens_of

_TAKEN = {
    "model": "infer.model",
    "tensor_parallel_size": "params.tensor_parallel_size",
    "pipeline_parallel_size": "params.pipeline_parallel_size",
    "seed": "params.seed",
}
_FORMS = {"json_schema": "json", "regex": "regex", "grammar": "grammar", "choice": "choice"}
_SAME = (
    "n", "temperature", "top_p", "top_k", "max_tokens", "min_tokens", "stop", "repetition_penalty",
    "presence_penalty", "frequency_penalty",
)  # fmt: skip


class VllmEngine:
    """See the module.

    Args:
        config: the model, and arguments of ``vllm.EngineArgs``.
    """

    def __init__(self, config: EngineConfig) -> None:
        known = {field.name for field in dataclasses.fields(EngineArgs)}
        check_arguments(config, known, _TAKEN)
        arguments = dict(config.arguments)
        for name in ("tensor_parallel_size", "pipeline_parallel_size"):
            if config.parameters.get(name) is not None:
                arguments[name] = config.parameters[name]
        self._adapter = None
        if config.adapter is not None:
            rank = json.loads((config.adapter / "adapter_config.json").read_text())["r"]
            arguments |= {"enable_lora": True, "max_loras": 1}
            arguments.setdefault("max_lora_rank", max(rank, 8))
            self._adapter = LoRARequest("adapter", 1, str(config.adapter))
        if current_platform.is_cpu():
            # One process is enough where nothing waits for a device, and a prompt that was cut in
            # two kills vLLM's engine for CPUs when its row has a seed.
            os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
            arguments.setdefault("enable_chunked_prefill", False)
        arguments.setdefault("disable_log_stats", True)
        try:
            self._engine = LLMEngine.from_engine_args(
                EngineArgs(model=str(config.model), **arguments)
            )
        except (OSError, ValueError, TypeError, VLLMValidationError) as error:
            raise EngineError(f"vLLM cannot load {config.model}: {error}") from error
        settings = self._engine.vllm_config
        self.limit = 2 * settings.scheduler_config.max_num_seqs
        self._longest = settings.model_config.max_model_len
        self._tokenizer = self._engine.get_tokenizer()
        self._chat_template = config.chat_template
        # Of each open row when it began, and whether vLLM makes its text.
        self._begun: dict[str, tuple[float, bool]] = {}

    def add(self, requests: Sequence[Request]) -> list[Answer]:
        """Take questions."""
        refused = []
        for request in requests:
            tokens = tokens_of(self._tokenizer, request, self._chat_template, self._longest - 1)
            if isinstance(tokens, Answer):
                refused.append(tokens)
                continue
            name = str(request.row)
            try:
                sampling = _sampling(request)
                self._engine.add_request(
                    name,
                    TokensPrompt(prompt_token_ids=tokens),
                    sampling,
                    lora_request=self._adapter,
                )
            except EngineDeadError:
                raise
            except Exception as error:  # noqa: BLE001
                # vLLM looks at a question before it takes it, and says no in many ways.
                refused.append(failed(request, "engine", f"{type(error).__name__}: {error}"))
            else:
                self._begun[name] = time.monotonic(), sampling.detokenize
        return refused

    def step(self) -> list[Answer]:
        """One step of the engine: a token of each of its rows."""
        if not self._begun:
            return []
        return [self._answer(found) for found in self._engine.step() if found.finished]

    def _answer(self, found: Any) -> Answer:
        row = int(found.request_id)
        begun, has_text = self._begun.pop(found.request_id)
        seconds = time.monotonic() - begun
        outputs = sorted(found.outputs, key=lambda output: output.index)
        reasons = [str(output.finish_reason) for output in outputs]
        if not set(reasons) <= {"stop", "length"}:
            return Answer(row, cause="engine", error=f"vLLM ended it with {', '.join(reasons)}")
        return Answer(
            row,
            text=[
                output.text
                if has_text
                else self._tokenizer.decode(output.token_ids, skip_special_tokens=True)
                for output in outputs
            ],
            finish_reason=reasons,
            prompt_tokens=len(found.prompt_token_ids),
            output_tokens=[len(output.token_ids) for output in outputs],
            logprobs=None
            if outputs[0].logprobs is None
            else [
                [
                    place[token].logprob
                    for token, place in zip(output.token_ids, output.logprobs, strict=True)
                ]
                for output in outputs
            ],
            seconds=seconds,
        )


def _sampling(request: Request) -> SamplingParams:
    parameters = request.parameters
    given = {name: parameters[name] for name in _SAME if parameters.get(name) is not None}
    for name, form in _FORMS.items():
        if parameters.get(name) is not None:
            given["structured_outputs"] = StructuredOutputsParams(**{form: parameters[name]})
    if parameters.get("logprobs"):
        given["logprobs"] = 0  # of the chosen token alone
    if parameters["temperature"]:
        given["seed"] = request.seed
    # Text token by token is needed only where some text ends the answer.
    given["detokenize"] = bool(parameters.get("stop"))
    return SamplingParams(**given, output_kind=RequestOutputKind.FINAL_ONLY)


def make(config: EngineConfig) -> VllmEngine:
    """The engine of a configuration."""
    return VllmEngine(config)
