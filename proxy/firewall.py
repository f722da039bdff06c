"""What a client may send to engines, and what it may see of them.

A client that could set `kv_transfer_params` could make an engine connect anywhere, read other requests' KV, or (with
one field) end it: vLLM 0.32 trips an assertion on it. Headers go by an allow list, in both directions.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from proxy.errors import BadRequestError

TRANSFER_FIELDS = ("kv_transfer_params", "ec_transfer_params")

_TO_ENGINE = (b"content-type", b"accept", b"traceparent", b"tracestate", b"anthropic-version", b"anthropic-beta")
_TO_CLIENT = (b"content-type", b"retry-after", b"www-authenticate")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:-]{1,128}")
_ID_BYTES, _IDS_AT_ONCE = 16, 64
_EVENT_ENDS = (b"\n\n", b"\r\n\r\n")
_NULL_TRANSFER = re.compile(rb',\s*"(?:kv|ec)_transfer_params":\s*null')
_SET_TOKEN_IDS = re.compile(rb'"prompt_token_ids":\s*\[')
_SET_METRICS = re.compile(rb'"metrics":\s*\{')
_SET_TRANSFER = re.compile(rb'"(?:kv|ec)_transfer_params":\s*\{')


def refuse_transfer_fields(fields: Mapping[str, Any]) -> None:
    """Raise `BadRequestError` where the client set a field that steers engines; null and {} are let through.

    vLLM 0.32 copies `vllm_xargs` to where its connectors look for the same fields. There even an empty value is
    refused: one that is neither null nor an object ends the engine.
    """
    extra = fields.get("vllm_xargs")
    for name in TRANSFER_FIELDS:
        if fields.get(name):
            raise _forbidden(name)
        if isinstance(extra, dict) and name in extra:
            raise _forbidden(f"vllm_xargs.{name}")


def _forbidden(name: str) -> BadRequestError:
    return BadRequestError(
        f"{name} is set by the router and may not be sent by a client; remove it", code="forbidden_field"
    )


def has_transfer_fields(fields: Mapping[str, Any]) -> bool:
    """Tell whether such a field is there at all, if only as null."""
    return any(name in fields for name in TRANSFER_FIELDS)


def without_transfer_fields(raw: bytes, **more: Any) -> bytes:
    """Return a body written anew without them, with `more` fields; the slow parser, since it loses no digit."""
    try:
        fields = json.loads(raw)
    except ValueError as error:  # an integer of thousands of digits
        raise BadRequestError(f"the body cannot be written anew: {error}") from error
    return _dump({name: value for name, value in fields.items() if name not in TRANSFER_FIELDS} | more)


@dataclass(frozen=True, slots=True)
class Authorization:
    """What engines are told: their own key; else, where the proxy checks no keys itself, what the client sent."""

    engine_key: str | None = None
    pass_on: bool = True

    def header(self, client: Mapping[bytes, bytes]) -> bytes | None:
        """Return the header's value for a request of this client."""
        if self.engine_key is not None:
            return b"Bearer " + self.engine_key.encode()
        return client.get(b"authorization") if self.pass_on else None


def headers_for_engine(client: Mapping[bytes, bytes], request_id: str, authorization: Authorization) -> bytes:
    """Return the headers of an engine call, as lines that end with CRLF.

    A value with a line break would begin a header of its own and is dropped; our server's parser lets none through.
    """
    value = authorization.header(client)
    more = b"authorization: %b\r\n" % value if value is not None else b""
    lines = [b"%b: %b\r\n" % (name, client[name]) for name in _TO_ENGINE if name in client]
    lines += [more] if more else []
    block = b"".join(lines)
    if block.count(b"\n") != len(lines) or block.count(b"\r") != len(lines):
        block = b"".join(line for line in lines if line.count(b"\n") == 1 == line.count(b"\r"))
    return b"x-request-id: %b\r\naccept-encoding: identity\r\n%b" % (request_id.encode(), block)


def headers_for_client(engine: Mapping[bytes, bytes]) -> dict[str, str]:
    """Return those of an engine's headers that a client may see."""
    return {name.decode(): engine[name].decode("latin-1") for name in _TO_CLIENT if name in engine}


def safe_request_id(given: bytes | None) -> str | None:
    """Return a client's request id if it is harmless in headers and logs, else None."""
    return given.decode() if given is not None and _REQUEST_ID.fullmatch(given) else None


class RequestIds:
    """Makes ids that nobody can guess; the system's randomness is fetched for many at once."""

    def __init__(self) -> None:
        self._made: list[str] = []

    def new(self) -> str:
        """Return a fresh id for one attempt: both legs share it, no two attempts do."""
        if not self._made:
            digits = secrets.token_hex(_ID_BYTES * _IDS_AT_ONCE)
            self._made = [f"pdc-{digits[at : at + 2 * _ID_BYTES]}" for at in range(0, len(digits), 2 * _ID_BYTES)]
        return self._made.pop()


class EventCleaner:
    """Takes handoff fields out of a stream's events, wherever its pieces are cut; whole events come out."""

    def __init__(self) -> None:
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Return the events that are now complete."""
        held = self._held + data
        cut = max(held.rfind(mark) + len(mark) if mark in held else 0 for mark in _EVENT_ENDS)
        events, self._held = held[:cut], held[cut:]
        if not events:
            return b""
        events = _NULL_TRANSFER.sub(b"", events)
        if _SET_TRANSFER.search(events):
            events = b"\n".join(map(_clean_line, events.split(b"\n")))
        return events

    def rest(self) -> bytes:
        """Return what the stream ended with, if that was no whole event."""
        held, self._held = self._held, b""
        return held


def _clean_line(line: bytes) -> bytes:
    """Take handoff fields that are set out of one line of an event and of the response it carries."""
    if line.endswith(b"\r"):
        return _clean_line(line[:-1]) + b"\r"
    name, mark, data = line.partition(b"data: ")
    if name or not _SET_TRANSFER.search(data):
        return line
    try:
        value = json.loads(data)
    except ValueError:
        return line
    for part in (value, value.get("response") if isinstance(value, dict) else None):
        if isinstance(part, dict):
            for field in TRANSFER_FIELDS:
                part.pop(field, None)
    return mark + _dump(value)


def _dump(value: Any) -> bytes:
    try:
        return json.dumps(value, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:  # a lone surrogate has no UTF-8
        return json.dumps(value, separators=(",", ":")).encode()


def clean_reply(body: bytes, asked: Mapping[str, Any]) -> bytes:
    """Take handoff fields, and token ids or timings that weren't asked for, out of a JSON answer.

    An answer that has none is returned as it is, to the byte; null fields are cut out without touching the rest
    (quotes inside JSON strings are escaped, so the pattern can only match a key).
    """
    if b"_transfer_params" in body:
        body = _NULL_TRANSFER.sub(b"", body)
    suspects = []
    if b"_transfer_params" in body:
        suspects = [name for name in TRANSFER_FIELDS if f'"{name}"'.encode() in body]
    if b'"prompt_token_ids"' in body and not asked.get("return_token_ids") and _SET_TOKEN_IDS.search(body):
        suspects.append("prompt_token_ids")
    if b'"metrics"' in body and _SET_METRICS.search(body):
        suspects.append("metrics")
    if not suspects:
        return body
    try:
        value = json.loads(body)
    except ValueError:
        return body
    if isinstance(value, dict):
        for name in suspects:
            value.pop(name, None)
    return _dump(value)
