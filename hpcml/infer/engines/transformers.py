"""The engine that comes with hpcml: ``generate`` of transformers, on padded batches.

The rows of a batch are those that stand together in their shard, so an answer depends neither on
what else runs nor on how often the work was interrupted. Drawing is by Gumbel noise from a
generator of each row's own seed, which gives the same distribution as ``torch.multinomial`` on the
processed scores (https://arxiv.org/abs/1611.01144, section 2), and the same draws in any batch.
"""

from __future__ import annotations

import collections
import os
import time
from collections.abc import Sequence
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LogitsProcessor
from transformers.generation.logits_process import (
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.utils import logging

from hpcml.infer.engine import Answer, EngineConfig, EngineError, Request, batch_size
from hpcml.infer.engines.prompting import check_arguments, failed, tokens_of

_KNOWN = {"batch_size", "dtype", "attn_implementation", "trust_remote_code", "max_model_len"}


class _Drawing(LogitsProcessor):  # type: ignore[misc]
    """Adds noise to the scores such that the largest is a draw from their distribution."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor) -> torch.Tensor:
        noise = torch.stack(
            [
                torch.empty(scores.shape[1]).exponential_(generator=generator)
                for generator in self._generators
            ]
        )
        return scores.float() - noise.log().to(scores.device)


class TransformersEngine:
    """See the module.

    Args:
        config: the model, and of the arguments ``batch_size`` (16), ``dtype`` (``auto``),
            ``attn_implementation``, ``max_model_len``, ``trust_remote_code``.
    """

    def __init__(self, config: EngineConfig) -> None:
        logging.disable_progress_bar()
        arguments = dict(config.arguments)
        check_arguments(config, _KNOWN, {})
        self.limit = 2 * batch_size(config.engine, arguments)
        arguments.pop("batch_size", None)
        longest = arguments.pop("max_model_len", None)
        arguments.setdefault("dtype", "auto")
        device_map = config.parameters.get("device_map")
        if device_map is None:
            device_map = "cuda" if torch.cuda.is_available() else "cpu"
        if device_map != "cpu":
            arguments["device_map"] = device_map  # which needs accelerate
        threads = os.environ.get("OMP_NUM_THREADS")
        if threads:
            torch.set_num_threads(int(threads))
        try:
            self._tokenizer = AutoTokenizer.from_pretrained(config.model)
            self._model = AutoModelForCausalLM.from_pretrained(config.model, **arguments).eval()
            if config.adapter is not None:
                from peft import PeftModel

                self._model = PeftModel.from_pretrained(self._model, config.adapter).eval()
        except (OSError, ValueError, TypeError) as error:
            raise EngineError(f"transformers cannot load {config.model}: {error}") from error
        text = self._model.config.get_text_config()
        most = getattr(text, "max_position_embeddings", None)
        self._longest = min(size for size in (longest, most, 2**31) if size is not None)
        self._chat_template = config.chat_template
        defaults = self._model.generation_config
        ends = defaults.eos_token_id
        if ends is None:
            ends = self._tokenizer.eos_token_id
        self._ends = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
        pad = self._tokenizer.pad_token_id
        self._pad = pad if pad is not None else next(iter(self._ends), 0)
        self._queue: collections.deque[list[tuple[Request, list[int]]]] = collections.deque()

    def add(self, requests: Sequence[Request]) -> list[Answer]:
        """Take the questions of one batch."""
        refused: list[Answer] = []
        batch = []
        for request in requests:
            tokens = tokens_of(self._tokenizer, request, self._chat_template, self._longest - 1)
            if isinstance(tokens, Answer):
                refused.append(tokens)
            else:
                batch.append((request, tokens))
        # Rows with parameters of their own can't share a call, nor those near the model's end.
        groups: dict[tuple[int, str], list[tuple[Request, list[int]]]] = {}
        for request, tokens in batch:
            key = self._room(request, tokens), repr(sorted(request.parameters.items()))
            groups.setdefault(key, []).append((request, tokens))
        self._queue.extend(groups.values())
        return refused

    def step(self) -> list[Answer]:
        """Answer one batch."""
        if not self._queue:
            return []
        batch = self._queue.popleft()
        try:
            return self._generate(batch)
        except Exception as error:  # noqa: BLE001
            # It may be one row's fault, or that of their number.
            if len(batch) > 1:
                if torch.cuda.is_available():
                    torch.cuda.empty_cache()
                middle = len(batch) // 2
                self._queue.extendleft([batch[middle:], batch[:middle]])
                return []
            return [failed(batch[0][0], "engine", f"{type(error).__name__}: {error}")]

    def _generate(self, batch: list[tuple[Request, list[int]]]) -> list[Answer]:
        begun = time.monotonic()
        parameters = batch[0][0].parameters
        width = max(len(tokens) for _, tokens in batch)
        ids = torch.full((len(batch), width), self._pad)
        mask = torch.zeros((len(batch), width), dtype=torch.long)
        for place, (_, tokens) in enumerate(batch):
            ids[place, width - len(tokens) :] = torch.tensor(tokens)
            mask[place, width - len(tokens) :] = 1
        device = self._model.device
        n = parameters["n"] or 1
        settings, processors = self._settings(batch, n)
        beams = parameters["num_beams"] or 1
        if n > 1 and beams == 1:
            ids, mask = ids.repeat_interleave(n, 0), mask.repeat_interleave(n, 0)
        with torch.inference_mode():
            output = self._model.generate(
                input_ids=ids.to(device),
                attention_mask=mask.to(device),
                generation_config=settings,
                logits_processor=processors,
                tokenizer=self._tokenizer,
            )
        new = output.sequences[:, width:].tolist()
        scores = self._logprobs(output, width) if parameters.get("logprobs") else None
        seconds = time.monotonic() - begun
        answers = []
        for place, (request, tokens) in enumerate(batch):
            mine = range(place * n, place * n + n)
            cut = [self._cut(new[index], parameters["stop"] or []) for index in mine]
            answers.append(
                Answer(
                    request.row,
                    text=[text for _, text, _ in cut],
                    finish_reason=["stop" if ended else "length" for _, _, ended in cut],
                    prompt_tokens=len(tokens),
                    output_tokens=[len(found) for found, _, _ in cut],
                    logprobs=None
                    if scores is None
                    else [
                        scores[i][: len(found)] for i, (found, *_) in zip(mine, cut, strict=True)
                    ],
                    seconds=seconds,
                )
            )
        return answers

    def _settings(
        self, batch: list[tuple[Request, list[int]]], n: int
    ) -> tuple[GenerationConfig, LogitsProcessorList]:
        parameters = batch[0][0].parameters
        settings = GenerationConfig(
            max_new_tokens=self._room(*batch[0]),
            min_new_tokens=parameters.get("min_tokens"),
            do_sample=False,
            num_beams=parameters["num_beams"] or 1,
            num_return_sequences=n if (parameters["num_beams"] or 1) > 1 else 1,
            repetition_penalty=parameters["repetition_penalty"],
            stop_strings=parameters["stop"],
            eos_token_id=sorted(self._ends) or None,
            pad_token_id=self._pad,
            return_dict_in_generate=True,
            output_logits=bool(parameters.get("logprobs")),
        )
        processors = LogitsProcessorList()
        temperature = parameters["temperature"]
        if temperature and (parameters["num_beams"] or 1) == 1:
            if temperature != 1:
                processors.append(TemperatureLogitsWarper(float(temperature)))
            if parameters["top_k"]:
                processors.append(TopKLogitsWarper(parameters["top_k"]))
            if parameters["top_p"] < 1:
                processors.append(TopPLogitsWarper(parameters["top_p"]))
            seeds = [request.seed + index for request, _ in batch for index in range(n)]
            processors.append(_Drawing(seeds))
        return settings, processors

    def _room(self, request: Request, tokens: list[int]) -> int:
        """The most tokens that an answer may have."""
        return min(int(request.parameters["max_tokens"]), self._longest - len(tokens))

    def _cut(self, tokens: list[int], stop: Sequence[str]) -> tuple[list[int], str, bool]:
        """An answer without what pads it: its tokens, its text, and whether it ended by itself."""
        ended = False
        for position, token in enumerate(tokens):
            if token in self._ends:
                tokens, ended = tokens[: position + 1], True
                break
        text = self._text(tokens)
        if any(word in text for word in stop):
            # The fewest tokens that have it; what follows is padding.
            low, high = 1, len(tokens)
            while low < high:
                middle = (low + high) // 2
                found = self._text(tokens[:middle])
                low, high = (low, middle) if any(w in found for w in stop) else (middle + 1, high)
            tokens, ended = tokens[:low], True
            text = self._text(tokens)
            text = text[: min(place for word in stop if (place := text.find(word)) >= 0)]
        return tokens, text, ended

    def _text(self, tokens: list[int]) -> str:
        return str(self._tokenizer.decode(tokens, skip_special_tokens=True))

    def _logprobs(self, output: Any, width: int) -> list[list[float]]:
        """Log-probability of each new token by the model itself, before anything is applied."""
        logits = torch.stack(output.logits, dim=1).float()
        chosen = output.sequences[:, width:].unsqueeze(-1)
        found: list[list[float]] = (
            torch.log_softmax(logits, -1).gather(-1, chosen).squeeze(-1).tolist()
        )
        return found


def make(config: EngineConfig) -> TransformersEngine:
    """The engine of a configuration."""
    return TransformersEngine(config)
