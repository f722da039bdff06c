"""Tokens of a request's prompt, and hashes of its blocks: no tokenizer, but the same tokens for the same text.

A token is four bytes of UTF-8, its id those bytes as a little-endian number; of a chat all contents are joined. So a
text of common letters has one token for each four characters.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from typing import Any

TOKEN_BYTES = 4


class PromptError(ValueError):
    """A prompt that an engine would refuse; the message is for its 400."""


def packed_tokens(fields: Mapping[str, Any]) -> bytes:
    """Return the token ids of a body, four bytes each, at least one. Raises `PromptError`.

    Ids that came along (a completion's prompt, `prompt_token_ids` in `kv_transfer_params`) are taken as they are.
    """
    handed_on = (fields.get("kv_transfer_params") or {}).get("prompt_token_ids")
    prompt = handed_on if handed_on is not None else fields.get("prompt")
    if "messages" in fields and handed_on is None:
        return _of_text(_chat_text(fields["messages"]))
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str):
        return _of_text(prompt)
    if not isinstance(prompt, list) or not prompt:
        raise PromptError("prompt must be one text or one list of token ids")
    try:
        return array("I", prompt).tobytes()
    except (TypeError, OverflowError):
        raise PromptError("prompt has a token id that is none") from None


def token_ids(packed: bytes) -> list[int]:
    """Return tokens as a list."""
    return array("I", packed).tolist()


def block_hashes(packed: bytes, block_tokens: int, keys: tuple[str, ...] = ()) -> tuple[int, ...]:
    """Return a hash of everything up to the end of each whole block; `keys` (LoRA, salt) make them another's."""
    size = block_tokens * TOKEN_BYTES
    digest = repr(keys).encode() if keys else b""
    hashes = []
    for start in range(0, len(packed) - size + 1, size):
        digest = hashlib.blake2b(digest + packed[start : start + size], digest_size=8).digest()
        hashes.append(int.from_bytes(digest, "big"))
    return tuple(hashes)


def _of_text(text: str) -> bytes:
    data = text.encode("utf-8", "surrogatepass")
    return data + b" " * (-len(data) % TOKEN_BYTES) if data else b"    "


def _chat_text(messages: Any) -> str:
    if not isinstance(messages, list) or not messages:
        raise PromptError("messages must be a list with at least one message")
    parts: list[str] = []
    for message in messages:
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, str):
            parts.append(content)
        elif isinstance(content, list):
            parts.extend(
                part["text"] for part in content if isinstance(part, dict) and isinstance(part.get("text"), str)
            )
    return "".join(parts)
