"""The token ids of a prompt, asked of an engine once for a request: it alone knows its template and its tokenizer.

Where engines have vLLM's render routes (`--enable-scale-out`), the answer is what the same engine would compute for the
same body. Elsewhere /tokenize comes close for chat, and exact for completions. Nothing here may fail a request: without
ids it is placed by what is known of its text, and the reason is counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineClient, EngineReply, EngineRequest
from proxy.errors import EngineFailedError, EngineTimeoutError
from proxy.exchange import Limit
from proxy.request import InferenceRequest, dump
from proxy.scheduling.block_index import TOKEN_BYTES, pack

# Where vLLM 0.32 takes exact ids instead of making them again, on either leg of chat and messages: a key within
# `kv_transfer_params` (`renderers/online_renderer.py`). Completions take them as their prompt.
HANDED_ON = "prompt_token_ids"
_OK, _REFUSED = 200, range(400, 500)
_NO_ROUTE = (403, 405)
_TEXT_PARTS = ("text", "input_text", "output_text")
_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Fields that /tokenize knows too.
_TOKENIZE_FIELDS: Mapping[str, Collection[str]] = {
    _COMPLETIONS: ("model", "prompt", "add_special_tokens"),
    _CHAT: (
        *("model", "messages", "tools", "add_generation_prompt", "continue_final_message", "add_special_tokens"),
        *("chat_template", "chat_template_kwargs"),
    ),
}
# Fields that change a prompt and that /tokenize does not know.
_CUTTING = ("truncate_prompt_tokens", "truncation_side")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Token ids, four bytes each; `exact` where the engine itself would compute just these."""

    packed: bytes
    exact: bool

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.packed) // TOKEN_BYTES

    def ids(self) -> list[int]:
        """Return them as engines take them; only exact ones may be handed on."""
        return array("I", self.packed).tolist()


@dataclass(frozen=True, slots=True)
class Tokenizing:
    """Limits: seconds for one answer, seconds of pause after so many failures in a row, bytes of ids that are kept."""

    answer: float = 0.5
    pause: float = 5.0
    failures: int = 3
    kept: int = 32 * 1024 * 1024
    without_render: float = 300.0  # until an endpoint without render routes is asked for them again


class Tokenizer:
    """Asks engines; keeps answers for bodies that come again, such as a retry's.

    `headers` returns those of an engine call for a request, the client's content type among them: vLLM refuses others.
    """

    def __init__(
        self,
        pools: Pools,
        client: EngineClient,
        headers: Callable[[InferenceRequest], bytes],
        clock: Callable[[], float],
        count: Callable[[str], None],
        limits: Tokenizing,
    ) -> None:
        self._pools = pools
        self._client = client
        self._headers = headers
        self._clock = clock
        self._count = count
        self._limits = limits
        self._kept: OrderedDict[bytes, Tokens] = OrderedDict()
        self._size = 0
        self._no_render: dict[str, float] = {}  # endpoint -> until when
        self._failures = 0
        self._paused = float("-inf")

    async def of(self, request: InferenceRequest) -> Tokens | None:
        """Return a request's tokens, None where they are not known; `count` hears which of `TOKEN_RESULTS` it was."""
        result, tokens = await self._find(request)
        self._count(result)
        return tokens

    async def _find(self, request: InferenceRequest) -> tuple[str, Tokens | None]:
        given = _given(request.fields)
        if given is not None:
            return "given", given
        if not _is_text(request.fields):
            return "not_text", None
        key = hashlib.sha256(b"%b\n%b" % (request.kind.route.encode(), request.raw)).digest()
        kept = self._kept.get(key)
        if kept is not None:
            self._kept.move_to_end(key)
            return "kept", kept
        result, tokens = await self._ask(request)
        if tokens is not None:
            self._keep(key, tokens)
        return result, tokens

    async def _ask(self, request: InferenceRequest) -> tuple[str, Tokens | None]:
        if self._clock() < self._paused:
            return "paused", None
        endpoint = self._endpoint()
        if endpoint is None:
            return "no_endpoint", None
        try:
            with endpoint.reserved():
                result, tokens = await self._ask_one(endpoint, request)
        except EngineFailedError as error:
            self._failed()
            return ("timeout" if isinstance(error, EngineTimeoutError) else "failed"), None
        if result == "failed":
            self._failed()
        else:
            self._failures = 0
        return result, tokens

    async def _ask_one(self, endpoint: Endpoint, request: InferenceRequest) -> tuple[str, Tokens | None]:
        """Render, or where that is not offered tokenize."""
        if self._clock() >= self._no_render.get(endpoint.name, float("-inf")):
            reply = await self._post(endpoint, request, f"{request.kind.route}/render", request.raw)
            if not _has_no_route(reply):
                return _read(reply, "rendered", exact=True)
            self._no_render[endpoint.name] = self._clock() + self._limits.without_render
        names = _TOKENIZE_FIELDS.get(request.kind.route)
        if names is None or any(request.fields.get(name) is not None for name in _CUTTING):
            return "unsupported", None
        body = dump({name: request.fields[name] for name in names if name in request.fields})
        reply = await self._post(endpoint, request, "/tokenize", body)
        return _read(reply, "tokenized", exact=request.kind.route == _COMPLETIONS)

    async def _post(self, endpoint: Endpoint, request: InferenceRequest, path: str, body: bytes) -> EngineReply:
        asked = EngineRequest(path, body, self._headers(request), replayable=True)
        return await self._client.call(endpoint, asked, leg=path, limit=Limit(self._limits.answer))

    def _endpoint(self) -> Endpoint | None:
        """Return the ready endpoint with the fewest requests in flight: rendering is its HTTP server's work."""
        ready = [*self._pools.ready("prefill"), *self._pools.ready("decode")]
        return min(ready, key=lambda item: item.in_flight, default=None)

    def _failed(self) -> None:
        self._failures += 1
        if self._failures >= self._limits.failures:
            self._paused = self._clock() + self._limits.pause
            self._failures = 0

    def _keep(self, key: bytes, tokens: Tokens) -> None:
        before = self._kept.get(key)
        self._kept[key] = tokens
        self._size += len(tokens.packed) - (0 if before is None else len(before.packed))
        while self._size > self._limits.kept:
            self._size -= len(self._kept.popitem(last=False)[1].packed)


def _given(fields: Mapping[str, Any]) -> Tokens | None:
    """Return a prompt that came as token ids."""
    prompt = fields.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt or type(prompt[0]) is not int:
        return None
    try:
        packed = pack(prompt)
    except (TypeError, OverflowError):  # the engine will refuse it
        return None
    return Tokens(packed, exact=not any(fields.get(name) is not None for name in _CUTTING))


def _is_text(fields: Mapping[str, Any]) -> bool:
    """Tell whether nothing in the conversation has to be fetched, decoded or looked at to be tokenized."""
    for name in ("messages", "input"):
        items = fields.get(name)
        for item in items if isinstance(items, list) else ():
            content = item.get("content") if isinstance(item, dict) else None
            for part in content if isinstance(content, list) else ():
                if isinstance(part, dict) and part.get("type", "text") not in _TEXT_PARTS:
                    return False
    return True


def _has_no_route(reply: EngineReply) -> bool:
    """Tell an engine without the route from one that refuses the request: a model may not be found either."""
    return reply.status in _NO_ROUTE or (reply.status == 404 and b'"detail"' in reply.body)  # noqa: PLR2004


def _read(reply: EngineReply, result: str, *, exact: bool) -> tuple[str, Tokens | None]:
    if reply.status in _REFUSED:
        return "refused", None
    try:
        value: Any = orjson.loads(reply.body) if reply.status == _OK else None
        value = value[0] if isinstance(value, list) else value
        return result, Tokens(pack(value["token_ids" if result == "rendered" else "tokens"]), exact)
    except (orjson.JSONDecodeError, LookupError, TypeError, OverflowError):
        return "failed", None
