"""A client's request: which API it speaks, its body, and whether it must run on decode alone."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from proxy.errors import BadRequestError
from proxy.shape import refuse_crowded, refuse_deep


@dataclass(frozen=True, slots=True)
class ApiKind:
    """One of the APIs that run disaggregated.

    `token_limits` are the fields that bound the answer, the first always set on the prefill leg, the others where the
    client sent them. `terminators` end a complete event stream. `preamble` marks events that vLLM 0.32 sends before it
    knows whether the KV arrived; `failures` mark an error event. `echoes_request` is true where events repeat the
    request's fields, those of the handoff included.
    """

    route: str
    token_limits: tuple[str, ...]
    terminators: tuple[bytes, ...]
    preamble: tuple[bytes, ...]
    failures: tuple[bytes, ...]
    anthropic: bool = False
    has_ignore_eos: bool = True
    has_store: bool = False
    echoes_request: bool = False


_OPENAI_FAILURES = (b'data: {"error"', b'data: {"object":"error"')
_TRUE_WORDS = ("true", "t", "yes", "y", "on", "1")  # pydantic's
_EXACT = 2.0**53
_LONG = 1000
# Without any of these a request is split.
_ALONE = ("echo", "use_beam_search", "background")
_MANY = ("n", "best_of")
_ALONE_IF_THERE = ("prompt_logprobs", "prompt_embeds", "previous_response_id")
_SUSPECTS = frozenset({"prompt", *_MANY, *_ALONE_IF_THERE, *_ALONE})
# What `why_aggregated` may return.
AGGREGATED_REASONS = (*_MANY, "prompt_list", *_ALONE_IF_THERE, *_ALONE)

KINDS: Mapping[str, ApiKind] = {
    kind.route: kind
    for kind in (
        ApiKind(
            route="/v1/chat/completions",
            token_limits=("max_tokens", "max_completion_tokens"),
            terminators=(b"\ndata: [DONE]",),
            preamble=(b'"delta":{"role":"assistant","content":""',),
            failures=_OPENAI_FAILURES,
        ),
        ApiKind(
            route="/v1/completions",
            token_limits=("max_tokens",),
            terminators=(b"\ndata: [DONE]",),
            preamble=(),
            failures=_OPENAI_FAILURES,
        ),
        ApiKind(
            route="/v1/responses",
            token_limits=("max_output_tokens",),
            terminators=(
                b"\nevent: response.completed",
                b"\nevent: response.incomplete",
                b"\nevent: response.failed",
            ),
            preamble=(b"event: response.created", b"event: response.in_progress"),
            failures=(b"event: error", b"event: response.failed", *_OPENAI_FAILURES),
            has_store=True,
            echoes_request=True,
        ),
        ApiKind(
            route="/v1/messages",
            token_limits=("max_tokens",),
            terminators=(b"\nevent: message_stop",),
            preamble=(b"event: message_start", b"event: ping"),
            failures=(b"event: error", *_OPENAI_FAILURES),
            anthropic=True,
            has_ignore_eos=False,
        ),
    )
}


# Served whole by one decode endpoint: methods by path.
PASSED_ON: Mapping[str, tuple[str, ...]] = {
    "/tokenize": ("POST",),
    "/detokenize": ("POST",),
    "/v1/embeddings": ("POST",),
    "/v1/messages/count_tokens": ("POST",),
    "/v1/score": ("POST",),
    "/score": ("POST",),
    "/v1/rerank": ("POST",),
    "/rerank": ("POST",),
    "/v2/rerank": ("POST",),
    "/v2/embed": ("POST",),
    "/classify": ("POST",),
    "/pooling": ("POST",),
    "/version": ("GET",),
}


class InferenceRequest(NamedTuple):
    """A parsed request. `raw` is the client's body to the byte, `fields` the same parsed; neither is ever changed."""

    kind: ApiKind
    raw: bytes
    fields: Mapping[str, Any]
    headers: Mapping[bytes, bytes]

    @property
    def stream(self) -> bool:
        """Tell whether the client wants events, by the values that engines take for true."""
        value = self.fields.get("stream")
        return value.lower() in _TRUE_WORDS if isinstance(value, str) else value in (True, 1)


def dump(body: Mapping[str, Any]) -> bytes:
    """Write JSON; what orjson refuses (lone surrogates, integers over 64 bits) is written by the slow way."""
    try:
        return orjson.dumps(body)
    except TypeError:
        return json.dumps(body, separators=(",", ":")).encode()


def rewritten(request: InferenceRequest, drop: Collection[str], put: Mapping[str, Any]) -> bytes:
    """Return a request's body without some fields and with others, every number in it as it was written.

    orjson rounds integers over 64 bits and knows no NaN, so a body that may hold such a number takes the slow way: a
    number in a tool's schema is part of the prompt, and both legs must see the same one.
    """
    if not _holds_odd_number(request.fields):
        kept = {name: value for name, value in request.fields.items() if name not in drop}
        return dump({**kept, **put})
    exact: dict[str, Any] = json.loads(request.raw.decode("utf-8", "surrogatepass"))
    kept = {name: value for name, value in exact.items() if name not in drop}
    return json.dumps({**kept, **put}, separators=(",", ":")).encode()


def _holds_odd_number(fields: Mapping[str, Any]) -> bool:
    """Tell whether there is a float that may have been an integer, or is none at all; long lists of integers aside."""
    todo: list[Any] = [fields]
    while todo:
        item = todo.pop()
        for child in item.values() if isinstance(item, dict) else item:
            kind = type(child)
            if kind is float:
                if not -_EXACT < child < _EXACT:
                    return True
            elif kind is dict or (kind is list and not (len(child) > _LONG and type(child[0]) is int)):
                todo.append(child)
    return False


def parse_object(raw: bytes) -> dict[str, Any]:
    """Parse a body that must be a JSON object; raises `BadRequestError` that says what is wrong with it."""
    if not raw.strip():
        raise BadRequestError("the body is empty; send a JSON object")
    refuse_crowded(raw)
    try:
        value = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        value = _parse_leniently(raw, error)
    if not isinstance(value, dict):
        raise BadRequestError(f"the body must be a JSON object, not {type(value).__name__}")
    refuse_deep(raw, value)
    return value


def _parse_leniently(raw: bytes, first: orjson.JSONDecodeError) -> Any:
    """Parse what engines accept and orjson doesn't: NaN, and escaped surrogates without a partner."""
    try:
        return json.loads(raw.decode("utf-8", "surrogatepass"))  # as bytes it would take UTF-16 too
    except (ValueError, RecursionError) as error:
        raise BadRequestError(f"the body is not valid JSON: {first}") from error


def why_aggregated(fields: Mapping[str, Any]) -> str | None:
    """Return why a request cannot be split over prefill and decode, None where it can; from a fixed set of reasons.

    vLLM 0.32 hands over the KV of one prompt with one choice, and recomputes where prompt log-probabilities are asked.
    """
    if fields.keys().isdisjoint(_SUSPECTS):
        return None
    for key in _MANY:
        if _number(fields.get(key)) > 1:
            return key
    if _many_prompts(fields.get("prompt")):
        return "prompt_list"
    for key in _ALONE_IF_THERE:
        if fields.get(key) is not None:
            return key
    return next((key for key in _ALONE if fields.get(key)), None)


def _number(value: Any) -> float:
    """Return a number as engines read it, from a string too; 0 for anything else, which they refuse."""
    try:
        return float(value) if isinstance(value, int | float | str) else 0
    except (ValueError, OverflowError):
        return 0


def _many_prompts(prompt: Any) -> bool:
    """Tell whether `prompt` is a list of several prompts: of strings or of lists of token ids."""
    return isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
