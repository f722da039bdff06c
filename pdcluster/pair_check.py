"""Warm a prefill x decode pair up, and compare its greedy answer with the aggregated one.

The first request of a pair pays the NIXL handshake, which takes seconds and may time out under load, so it is made
before anyone waits for it. The comparison runs on the decode engine twice, once with KV from prefill and once alone.
A `cache_salt` of its own for each run keeps one from reading the other's prefix cache.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

_ATTEMPTS = 3
_TOKENS = 12
_TIMEOUT_S = 120.0
_METRIC_WAIT_S = 5.0

# Long enough to fill more than one KV block (128 tokens on CPU), with facts early on that the end depends on.
_PROMPT = (
    "The ledger of the harbour lists ships by number. "
    + " ".join(
        f"Ship {number} carries cargo {number * number % 89} to pier {number * 7 % 13}." for number in range(1, 25)
    )
    + " Ship 7 carries cargo"
)


class PairCheckError(Exception):
    """A request of the check failed; the message says which leg and why."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer: token ids, and for each the gap between the two best log-probabilities."""

    tokens: tuple[int, ...]
    gaps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class PairResult:
    """What became of one pair; `ok` is false for a failed request, a differing answer, or KV that didn't move."""

    prefill: str
    decode: str
    ok: bool
    detail: str
    kv_bytes: int = 0
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Engine:
    """An engine by the name it has in the plan and its URL."""

    name: str
    url: str


class PairChecker:
    """Checks pairs of one model; `salt` gives a fresh string each time, `tolerance` is in log-probability."""

    def __init__(self, client: httpx.Client, model: str, tolerance: float, salt: Callable[[], str]) -> None:
        self._client = client
        self._model = model
        self._tolerance = tolerance
        self._salt = salt

    def aggregated(self, decode: Engine) -> Answer:
        """Return the answer of the decode engine alone; raises `PairCheckError`."""
        return _answer(self._post(decode, self._body(), f"{decode.name} alone"))

    def check(self, prefill: Engine, decode: Engine, expected: Answer) -> PairResult:
        """Run the prompt through the pair, up to three times, each with a new prefill."""
        detail = ""
        for _ in range(_ATTEMPTS):
            try:
                before = self._moved(decode)
                answer = self._disaggregated(prefill, decode)
            except PairCheckError as error:
                detail = str(error)
                continue
            return self._compare(prefill, decode, answer, expected, before)
        return PairResult(prefill.name, decode.name, ok=False, detail=detail)

    def _compare(self, prefill: Engine, decode: Engine, answer: Answer, expected: Answer, before: float) -> PairResult:
        moved = int(self._wait_for_growth(decode, before))
        difference = first_difference(expected, answer, self._tolerance)
        if difference is not None:
            detail = f"token {difference} differs from the aggregated answer"
        elif moved <= 0:
            detail = "the answer is right but no KV came over NIXL: decode computed the prompt itself"
        else:
            return PairResult(prefill.name, decode.name, ok=True, detail="equal", kv_bytes=moved)
        differs = difference is not None
        return PairResult(prefill.name, decode.name, ok=False, detail=detail, kv_bytes=max(0, moved), differs=differs)

    def _disaggregated(self, prefill: Engine, decode: Engine) -> Answer:
        body = self._body()
        first = {**body, "max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False}}
        reply = self._post(prefill, first, f"prefill on {prefill.name}")
        handoff = reply.get("kv_transfer_params")
        if not isinstance(handoff, dict):
            raise PairCheckError(f"prefill on {prefill.name}: the reply has no kv_transfer_params")
        return _answer(self._post(decode, {**body, "kv_transfer_params": handoff}, f"decode on {decode.name}"))

    def _body(self) -> dict[str, Any]:
        return {
            "model": self._model,
            "prompt": _PROMPT,
            "max_tokens": _TOKENS,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 2,
            "return_token_ids": True,
            "cache_salt": self._salt(),
        }

    def _post(self, engine: Engine, body: Mapping[str, Any], leg: str) -> dict[str, Any]:
        try:
            reply = self._client.post(f"{engine.url}/v1/completions", json=body, timeout=_TIMEOUT_S)
        except httpx.HTTPError as error:
            raise PairCheckError(f"{leg}: {type(error).__name__}: {error}") from error
        if reply.status_code != httpx.codes.OK:
            raise PairCheckError(f"{leg}: HTTP {reply.status_code}: {reply.text[:200]}")
        data: dict[str, Any] = reply.json()
        return data

    def _moved(self, decode: Engine) -> float:
        """Return the bytes that this decode engine has fetched so far."""
        try:
            text = self._client.get(f"{decode.url}/metrics", timeout=_TIMEOUT_S).text
        except httpx.HTTPError as error:
            raise PairCheckError(f"metrics of {decode.name}: {error}") from error
        return transferred_bytes(text)

    def _wait_for_growth(self, decode: Engine, before: float) -> float:
        """Return how much more was fetched; the engine publishes the figure a moment after the answer."""
        deadline = time.monotonic() + _METRIC_WAIT_S
        while (grown := self._moved(decode) - before) <= 0 and time.monotonic() < deadline:
            time.sleep(0.1)
        return grown


def transferred_bytes(metrics: str) -> float:
    """Return the sum of `vllm:nixl_bytes_transferred` in an engine's /metrics text, 0 where it is absent."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name in ("vllm:nixl_bytes_transferred_sum", "vllm:nixl_bytes_transferred_total")
    )


def first_difference(expected: Answer, answer: Answer, tolerance: float) -> int | None:
    """Return the index of the first differing token, None where the answers agree.

    A difference is excused where both sides were within `tolerance` of choosing otherwise; what follows it has
    another history and is not compared.
    """
    for index, (left, right) in enumerate(zip(expected.tokens, answer.tokens, strict=False)):
        if left != right:
            tied = expected.gaps[index] <= tolerance and answer.gaps[index] <= tolerance
            return None if tied else index
    shorter = min(len(expected.tokens), len(answer.tokens))
    return None if len(expected.tokens) == len(answer.tokens) else shorter


def pair_rounds(prefills: Sequence[Engine], decodes: Sequence[Engine]) -> list[list[tuple[Engine, Engine]]]:
    """Return every pair once, in rounds in which no engine appears twice."""
    longer, shorter = (decodes, prefills) if len(decodes) >= len(prefills) else (prefills, decodes)
    rounds = []
    for shift in range(len(longer)):
        matched = [(shorter[index], longer[(index + shift) % len(longer)]) for index in range(len(shorter))]
        rounds.append(matched if longer is decodes else [(right, left) for left, right in matched])
    return rounds


def _answer(reply: Mapping[str, Any]) -> Answer:
    try:
        choice = reply["choices"][0]
        best = [sorted(top.values(), reverse=True) for top in choice["logprobs"]["top_logprobs"]]
        gaps = tuple(values[0] - values[1] if len(values) > 1 else 0.0 for values in best)
        return Answer(tuple(choice["token_ids"]), gaps)
    except (KeyError, IndexError, TypeError) as error:
        raise PairCheckError(f"the engine's answer has not the form expected: {error!r}") from error
