"""The HTTP routes of one simulated engine: vLLM's OpenAI server, prefill and decode apart over NIXL.

What it checks as vLLM does: model, context length, one prompt; whatever fails after a decode was given a handoff frees
the holder's KV. A handoff that is dead (fetched before, lease over) is answered 200 with wrong text, as vLLM does; the
text is " stale", and it is counted. One that makes a real engine exit (no holder named) is answered 500.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from pdcluster.simulation.answers import Answer, error
from pdcluster.simulation.connection import Asked, Reply
from pdcluster.simulation.job import Job, Work
from pdcluster.simulation.prompt_tokens import TOKEN_BYTES, PromptError, block_hashes, packed_tokens, token_ids
from pdcluster.simulation.wire_engine import MODEL, Handoff, WireEngine

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"
_SIDE_PORT = 5600  # of NIXL's handshakes: nothing listens there
_CHAT_TOKENS = 256  # of a chat without a limit: a model would end it some time
_COMPLETION_TOKENS = 16
_KEEP = "do_remote_decode"
_FETCH = "do_remote_prefill"


class _RefusedError(Exception):
    """A request that is answered with a status and a message."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Routes:
    """Answers for one engine. `engines` finds the holders of handoffs, `stats` are those of all."""

    def __init__(
        self, wire: WireEngine, engines: Mapping[str, WireEngine], stats: Callable[[], dict[str, Any]]
    ) -> None:
        self._wire = wire
        self._engines = engines
        self._gets: dict[str, Callable[[], Any]] = {
            "/health": lambda: b"",
            "/v1/models": self._models,
            "/metrics": wire.metrics.render,
            "/version": lambda: {"version": "0.32.0"},
            "/load": lambda: {"server_load": wire.engine.running + wire.engine.waiting},
            "/kv_event_sources": lambda: {"0": wire.publisher.source()} if wire.publisher is not None else {},
            "/stats": stats,
        }

    def handle(self, asked: Asked, reply: Reply) -> None:
        """Answer a request, now or when its tokens are made."""
        try:
            if asked.path in self._gets and asked.method == "GET":
                kind = "text/plain; version=0.0.4; charset=utf-8" if asked.path in ("/metrics", "/health") else ""
                reply.send(200, self._gets[asked.path](), kind=kind)
            elif asked.method == "POST" and asked.path in (_CHAT, _COMPLETIONS):
                self._generate(asked, _fields(asked), reply)
            elif asked.method == "POST" and asked.path == "/tokenize":
                reply.send(200, self._tokenized(_fields(asked)))
            elif asked.path.endswith("/render"):
                raise _RefusedError(403, "Forbidden: start the engine with --enable-scale-out")
            else:
                raise _RefusedError(404, "Not Found")
        except _RefusedError as refused:
            status = 400 if refused.status == _SCHEMA else refused.status
            reply.send(status, error(status, str(refused)))

    def _models(self) -> dict[str, Any]:
        limit = self._wire.engine.profile.max_model_len
        model = {"id": MODEL, "object": "model", "created": 1, "owned_by": "pdcluster", "max_model_len": limit}
        return {"object": "list", "data": [model]}

    def _tokenized(self, fields: dict[str, Any]) -> dict[str, Any]:
        tokens = token_ids(_packed(fields))
        limit = self._wire.engine.profile.max_model_len
        return {"count": len(tokens), "max_model_len": limit, "tokens": tokens, "token_strs": None}

    def _generate(self, asked: Asked, fields: dict[str, Any], reply: Reply) -> None:
        given = fields.get("kv_transfer_params") or {}
        fetches = given.get(_FETCH) is True
        try:
            packed = _packed(fields)
            answer = self._answer(asked, fields, reply, len(packed) // TOKEN_BYTES)
        except _RefusedError as refused:
            if fetches and refused.status != _SCHEMA:
                self._give_up(given)
            raise
        profile, salt = self._wire.engine.profile, fields.get("cache_salt")
        hashes = block_hashes(packed, profile.block_tokens, (str(salt),) if salt else ())
        job = Job(answer.name, answer.prompt_tokens, answer.output_tokens, hashes)
        handoff = None
        if given.get(_KEEP) is True:
            self._keep(job, answer)
        elif fetches:
            handoff = self._fetch(given, job, answer)
            if handoff is None:
                return
        else:
            self._wire.counted.alone += 1
        if self._wire.publisher is not None:
            self._wire.publisher.note(hashes, packed, str(salt) if salt else None)
        if not self._wire.submit(job, answer, handoff):
            if self._wire.publisher is not None:
                self._wire.publisher.forget(hashes)
            if handoff is not None and handoff.alive:
                handoff.holder.release(handoff.name)
            raise _RefusedError(400, "The request needs more KV blocks than this engine has")

    def _answer(self, asked: Asked, fields: dict[str, Any], reply: Reply, prompt_tokens: int) -> Answer:
        chat = asked.path == _CHAT
        output_tokens = _limit(fields, chat=chat)
        model = fields.get("model", MODEL)
        if model != MODEL:
            raise _RefusedError(404, f"The model `{model}` does not exist.")
        if fields.get("n", 1) != 1:
            raise _RefusedError(_SCHEMA, "simulated engines make one answer a request: n must be 1")
        if not self._wire.fits(prompt_tokens, output_tokens):
            limit = self._wire.engine.profile.max_model_len
            message = (
                f"This model's maximum context length is {limit} tokens; {prompt_tokens} and {output_tokens} asked"
            )
            raise _RefusedError(400, message)
        name = asked.headers.get("x-request-id") or uuid.uuid4().hex
        usage = (fields.get("stream_options") or {}).get("include_usage") is True
        return Answer(
            reply,
            f"{'chatcmpl' if chat else 'cmpl'}-{name}-{uuid.uuid4().hex[:8]}",
            chat,
            fields.get("stream") is True,
            usage,
            MODEL,
            int(self._wire.clocks.wall()),
            prompt_tokens,
            output_tokens,
            load_format=asked.headers.get("endpoint-load-metrics-format", ""),
        )

    def _keep(self, job: Job, answer: Answer) -> None:
        if answer.output_tokens != 1 or answer.stream:
            raise _RefusedError(
                _SCHEMA, "simulated engines keep KV for a decode of one token that is not streamed only"
            )
        job.work = Work.PREFILL
        self._wire.counted.prefills += 1
        blocks = self._wire.engine.profile.blocks(job.prompt_tokens)
        answer.handoff = {
            _FETCH: True,
            _KEEP: False,
            "remote_block_ids": [list(range(1, blocks + 1))],
            "remote_engine_id": self._wire.name,
            "remote_request_id": answer.name,
            "remote_host": "127.0.0.1",
            "remote_port": _SIDE_PORT,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": job.prompt_tokens,
            "remote_blocks_expiry_time": None,
            "transfer_mode": "pull",
        }

    def _fetch(self, given: dict[str, Any], job: Job, answer: Answer) -> Handoff | None:
        """Make the job one that fetches; None where that has failed already, and is answered."""
        name, holder = given.get("remote_request_id"), given.get("remote_engine_id")
        if not isinstance(name, str) or not isinstance(holder, str) or not given.get("remote_block_ids"):
            raise _RefusedError(500, "EngineDeadError: a real engine exits on do_remote_prefill without a handoff")
        self._wire.counted.fetches += 1
        if holder not in self._engines:
            self._wire.metrics.failed_transfers += 1
            answer.failed(f"KV load failed: no handshake with engine {holder}")
            return None
        found = self._engines[holder]
        alive = found.claim(name)
        if not alive:
            answer.word = " stale"
            self._wire.counted.dead_handoffs += 1
            found.metrics.after_expiry += 1
        job.work = Work.PULL
        told = given.get("remote_prefill_cached_tokens")
        answer.cached_tokens = told if isinstance(told, int) else max(0, job.prompt_tokens - 1)
        return Handoff(found, name, alive)

    def _give_up(self, given: dict[str, Any]) -> None:
        """Have the holder of a handoff that will not be fetched free its KV."""
        holder = self._engines.get(str(given.get("remote_engine_id")))
        if holder is not None and holder.claim(str(given.get("remote_request_id"))):
            holder.release(str(given.get("remote_request_id")))


_SCHEMA = 422  # stands for a body that is refused before the handler, which frees nothing; it is told as 400


def _fields(asked: Asked) -> dict[str, Any]:
    try:
        fields = orjson.loads(asked.body)
    except orjson.JSONDecodeError as bad:
        raise _RefusedError(_SCHEMA, f"JSON decode error: {bad}") from None
    if not isinstance(fields, dict) or not isinstance(fields.get("kv_transfer_params") or {}, dict):
        raise _RefusedError(_SCHEMA, "the body must be an object, kv_transfer_params one or null")
    return fields


def _packed(fields: dict[str, Any]) -> bytes:
    try:
        return packed_tokens(fields)
    except PromptError as bad:
        raise _RefusedError(_SCHEMA, str(bad)) from None


def _limit(fields: dict[str, Any], *, chat: bool) -> int:
    """Return how many tokens are asked for."""
    limit = fields.get("max_completion_tokens") if chat else None
    limit = fields.get("max_tokens") if limit is None else limit
    if limit is None:
        return _CHAT_TOKENS if chat else _COMPLETION_TOKENS
    if not isinstance(limit, int) or isinstance(limit, bool) or limit < 1:
        raise _RefusedError(_SCHEMA, f"max_tokens must be at least 1, got {limit!r}.")
    minimum = fields.get("min_tokens")
    if isinstance(minimum, int) and minimum > limit:
        raise _RefusedError(_SCHEMA, f"min_tokens must be at most max_tokens={limit}, got {minimum}.")
    return limit
