"""Measure an engine through its OpenAI API: prompts of many lengths one by one, then batches that decode together.

Prompts are random token ids, so that lengths are exact and nothing is cached; answers have a fixed length
(`ignore_eos`, which vLLM knows).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

import httpx
import orjson
from prometheus_client.parser import text_string_to_metric_families

from pdcluster.bench.engine_fit import DecodePoint, Measured, PrefillPoint, shared_steps
from pdcluster.errors import LaunchError, UserError
from pdcluster.replay.exchange import Answer, Target, ask

_PATH = "/v1/completions"
_IDS = (1000, 30_000)  # ordinary tokens in every vocabulary that is in use
_SHORTEST = 64
_SHORT_CONTEXT = 64
_LONGEST_CONTEXT = 2048
_MOST_STEPS = 512


@dataclass(frozen=True, slots=True)
class Sweep:
    """What is measured: prompts up to so many tokens, batches up to so many sequences, `steps` tokens an answer.

    Each point is measured `repeats` times.
    """

    max_prompt: int = 8192
    max_batch: int = 32
    steps: int = 48
    repeats: int = 3
    timeout: float = 120.0
    seed: int = 0


@dataclass
class _Timed(Answer):
    """An answer that keeps when each of its events came, also of tokens that are no text."""

    times: list[float] = field(default_factory=list)

    def _take_event(self, event: dict[str, Any], now: float) -> None:
        if event.get("choices"):
            self.times.append(now)
        super()._take_event(event, now)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What an engine says of itself; None where it doesn't."""

    max_model_len: int | None
    block_tokens: int | None
    kv_blocks: int | None

    @property
    def kv_tokens(self) -> float:
        """Return how many tokens the KV memory holds."""
        return self.block_tokens * self.kv_blocks if self.block_tokens and self.kv_blocks else float("inf")


class Probe:
    """Measures one engine; `say` hears of the progress."""

    def __init__(
        self, target: Target, model: str, sweep: Sweep, clock: Callable[[], float], say: Callable[[str], None]
    ) -> None:
        self._target = target
        self._model = model
        self._sweep = sweep
        self._clock = clock
        self._say = say
        self._rng = random.Random(sweep.seed)  # noqa: S311 - prompts, no secrets

    async def run(self) -> Measured:
        """Measure everything. Raises `LaunchError` where the engine fails, `UserError` where it cannot be measured."""
        limits = await asyncio.to_thread(_read_limits, self._target)
        await self._ask(_SHORTEST, 2)  # whatever an engine does only once
        prefill = [await self._prefill(tokens) for tokens in self._lengths(limits)]
        decode = [
            await self._decode(sequences, context)
            for context in self._contexts(limits)
            for sequences in self._batches(context, limits)
        ]
        return Measured(
            self._target.origin,
            tuple(prefill),
            tuple(decode),
            limits.max_model_len,
            limits.block_tokens,
            limits.kv_blocks,
        )

    def _lengths(self, limits: _Limits) -> list[int]:
        longest = min(self._sweep.max_prompt, (limits.max_model_len or self._sweep.max_prompt + 1) - 1)
        return doubling(_SHORTEST, int(min(longest, limits.kv_tokens - 1)))

    def _contexts(self, limits: _Limits) -> list[int]:
        room = (limits.max_model_len or _LONGEST_CONTEXT + _MOST_STEPS) - _MOST_STEPS
        long = min(_LONGEST_CONTEXT, self._sweep.max_prompt, room)
        return [_SHORT_CONTEXT, long] if long > _SHORT_CONTEXT else [_SHORT_CONTEXT]

    def _batches(self, context: int, limits: _Limits) -> list[int]:
        fitting = int(min(self._sweep.max_batch, limits.kv_tokens // (context + 2 * self._sweep.steps)))
        return doubling(1, fitting)

    async def _prefill(self, tokens: int) -> PrefillPoint:
        seen = []
        for _ in range(self._sweep.repeats):
            begun = self._clock()
            answer = await self._ask(tokens, 1)
            seen.append(answer.times[0] - begun)
        self._say(f"prefill of {tokens} tokens: {1000 * median(seen):.1f} ms")
        return PrefillPoint(tokens, median(seen))

    async def _decode(self, sequences: int, context: int) -> DecodePoint:
        seen = [await self._decode_once(sequences, context) for _ in range(self._sweep.repeats)]
        seconds = median(seconds for seconds, _ in seen)
        self._say(f"step of {sequences} sequences at {context} tokens: {1000 * seconds:.2f} ms")
        return DecodePoint(sequences, fmean(total for _, total in seen), seconds)

    async def _decode_once(self, sequences: int, context: int) -> tuple[float, float]:
        """Return the seconds of a step while all sequences decode, and the tokens of context they have then."""
        steps = self._sweep.steps
        while True:
            answers = await asyncio.gather(*(self._ask(context, steps) for _ in range(sequences)))
            shared = shared_steps([answer.times for answer in answers], steps)
            if shared is not None:
                return shared[0], sequences * context + shared[1]
            if steps >= _MOST_STEPS:
                raise LaunchError(
                    f"{sequences} sequences never decode at once: lower --max-batch to the engine's seats"
                )
            steps *= 2

    async def _ask(self, prompt_tokens: int, output_tokens: int) -> _Timed:
        fields = {
            "model": self._model,
            "prompt": [self._rng.randrange(*_IDS) for _ in range(prompt_tokens)],
            "max_tokens": output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        answer = _Timed()
        try:
            async with asyncio.timeout(self._sweep.timeout):
                await ask(self._target, self._target.request(_PATH, orjson.dumps(fields)), answer, self._clock)
        except TimeoutError:
            answer.fail("timeout", f"not over after {self._sweep.timeout:g} s")
        where = f"{self._target.origin}{_PATH}"
        if answer.error or not answer.times:
            what = f"{answer.error} {answer.detail}".strip() or "no token"
            raise LaunchError(f"{where}: {prompt_tokens} + {output_tokens} tokens failed: {what}")
        if answer.prompt_tokens not in (None, prompt_tokens) or answer.tokens not in (None, output_tokens):
            counted = f"{answer.prompt_tokens} + {answer.tokens}"
            raise UserError(f"{where}: counts {counted} tokens of {prompt_tokens} + {output_tokens}: measure an engine")
        return answer


def doubling(first: int, last: int) -> list[int]:
    """Return numbers from the first to the last, each twice the one before, the last among them."""
    found = []
    while first < last:
        found.append(first)
        first *= 2
    return [*found, last] if last > 0 else []


def _read_limits(target: Target) -> _Limits:
    """Return what the engine tells: its context at /v1/models, its KV blocks at /metrics."""
    headers = {"authorization": f"Bearer {target.key}"} if target.key else {}
    try:
        models = httpx.get(f"{target.origin}/v1/models", headers=headers, timeout=10).json()
        length = models["data"][0].get("max_model_len")
        metrics = httpx.get(f"{target.origin}/metrics", headers=headers, timeout=10)
    except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError(f"{target.origin}: is no engine that can be measured: {error!r}") from None
    labels = _cache_labels(metrics.text) if metrics.status_code == httpx.codes.OK else {}
    return _Limits(length, _whole(labels.get("block_size")), _whole(labels.get("num_gpu_blocks")))


def _cache_labels(text: str) -> dict[str, str]:
    """Return the labels of vLLM's `vllm:cache_config_info`."""
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name == "vllm:cache_config_info":
                    return dict(sample.labels)
    except ValueError:
        return {}
    return {}


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
