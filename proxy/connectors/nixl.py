"""NIXL, pull mode: prefill makes one token and keeps the KV, decode fetches it. Source: vLLM 0.32's NIXL connector."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from proxy.firewall import TRANSFER_FIELDS, has_transfer_fields, without_transfer_fields
from proxy.request import InferenceRequest, dump, rewritten

_ASK_PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}

# Not on the prefill leg: it makes one token, whole, without conditions on how it ends.
_DROPPED = (
    "min_tokens",
    "stream_options",
    "stop",
    "stop_token_ids",
    "stop_sequences",
    "logprobs",
    "top_logprobs",
    "logprob_token_ids",
    "background",
    *TRANSFER_FIELDS,
)
_TOO_MANY_TOKENS = 2**31 - 1
_NEEDED = {"remote_engine_id": str, "remote_request_id": str, "remote_host": str, "remote_port": int}


class NixlConnector:
    """Builds both legs; a handoff is used once, and a new attempt prefills again."""

    overlaps = False
    may_decode_alone = True

    def prefill_body(self, request: InferenceRequest) -> bytes:
        """Return the client's body with one token asked for, without streaming, and with the KV kept."""
        fields = request.fields
        first, *others = request.kind.token_limits
        body: dict[str, Any] = {first: 1, "stream": False, "kv_transfer_params": _ASK_PREFILL}
        for name in others:
            if name in fields:
                body[name] = 1
        if "n" in fields:
            body["n"] = 1
        if request.kind.has_store or "store" in fields:
            body["store"] = False
        if request.kind.has_ignore_eos:
            body["ignore_eos"] = True
        return rewritten(request, _DROPPED, body)

    def handoff(self, reply: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return `kv_transfer_params` of the reply if decode can use them."""
        params = reply.get("kv_transfer_params")
        if not isinstance(params, dict) or params.get("do_remote_prefill") is not True:
            return None
        if not isinstance(params.get("remote_block_ids"), list) or not params["remote_block_ids"]:
            return None
        for name, kind in _NEEDED.items():
            if not isinstance(params.get(name), kind):
                return None
        return params

    def decode_body(self, request: InferenceRequest, handoff: Mapping[str, Any]) -> tuple[bytes | memoryview, bytes]:
        """Return the client's bytes with the handoff added before the last brace, so that nothing else can change."""
        if has_transfer_fields(request.fields):
            return without_transfer_fields(request.raw, kv_transfer_params=handoff), b""
        end = len(request.raw.rstrip()) - 1
        comma = b"," if request.fields else b""
        field = b'"kv_transfer_params":' + orjson.dumps(handoff) + b"}"
        return memoryview(request.raw)[:end], comma + field

    def release_body(self, request: InferenceRequest, handoff: Mapping[str, Any]) -> bytes:
        """Return a completion of more tokens than any context holds.

        vLLM 0.32 refuses it in its handler and there has prefill notified (`notify_kv_transfer_request_rejected`); a
        body that breaks the schema would be refused before, and free nothing.
        """
        body: dict[str, Any] = {"prompt": "x", "max_tokens": _TOO_MANY_TOKENS, "kv_transfer_params": handoff}
        if isinstance(request.fields.get("model"), str):
            body["model"] = request.fields["model"]
        return dump(body)
