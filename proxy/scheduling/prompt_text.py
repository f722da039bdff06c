"""The part of a request that becomes prompt, as one text: the same for clients that write JSON differently. Pure.

Not the raw body: the order of fields, white space, escapes and every sampling parameter differ between requests that
share a prefix, and stand before what they share. Not the rendered prompt either: that needs the engine's template.
So the parsed values, in the order in which chat templates write them, strings as they are (no second pass over a long
one), everything else as JSON with its keys sorted.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

from proxy.request import InferenceRequest
from proxy.scheduling.block_index import pack

# What templates write before the conversation, or what changes how they write all of it.
_HEAD = (
    "chat_template",
    "chat_template_kwargs",
    "reasoning_effort",
    "reasoning",
    "documents",
    "tools",
    "instructions",
    "system",
)
_SALT = ("model", "cache_salt")
_FIELD, _ITEM = "\x00", "\x01"


def prompt_text(request: InferenceRequest) -> str | bytes:
    """Return what two requests with a common prompt prefix have in common at their start.

    Text for text, four bytes a token for token ids. A conversation that goes on begins with the whole of what it was.
    """
    fields = request.fields
    prompt = fields.get("prompt")
    if isinstance(prompt, list):
        if len(prompt) == 1 and isinstance(prompt[0], str | list):
            prompt = prompt[0]
        ids = _as_bytes(prompt) if isinstance(prompt, list) else None
        if ids is not None:
            return ids
    if isinstance(prompt, str):
        return prompt
    pieces: list[str] = []
    for name in _HEAD:
        if fields.get(name) is not None:
            pieces += (_FIELD, name, _FIELD, *_content(fields[name]))
    for name in ("prompt", "messages", "input"):
        value = fields.get(name)
        if isinstance(value, list):
            for item in value:
                pieces += (_ITEM, *_message(item))
        elif value is not None:
            pieces += (_ITEM, *_content(value))
    return "".join(pieces)


def prompt_salt(request: InferenceRequest) -> str:
    """Return what keeps equal prompts apart: the model (a LoRA adapter has a name of its own) and `cache_salt`."""
    return _FIELD.join(str(request.fields.get(name)) for name in _SALT)


def _message(item: Any) -> Iterator[str]:
    if not isinstance(item, Mapping):
        yield from _content(item)
        return
    yield str(item.get("role"))
    yield _FIELD
    yield from _content(item.get("content"))
    more = {name: value for name, value in item.items() if name not in ("role", "content") and value is not None}
    if more:
        yield _json(more)


def _content(value: Any) -> Iterator[str]:
    """Yield a string as it is, and a list of text parts as the string that it stands for."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list):
        for part in value:
            text = part.get("text") if isinstance(part, Mapping) else None
            yield text if isinstance(text, str) else _json(part)
    elif value is not None:
        yield _json(value)


def _json(value: Any) -> str:
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # lone surrogates, integers over 64 bits
        return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _as_bytes(ids: Sequence[Any]) -> bytes | None:
    try:
        return pack(ids)
    except (TypeError, OverflowError):  # not token ids: the engine will refuse them
        return None
