"""Shapes that no prompt has: JSON nested too deep, or of so many parts that reading it would stop all streams for long.

Text is not at issue, however long it is: a parser copies it. Every object, name and number costs some 100 ns and more
memory than its bytes: a body of 10 MB takes 0.02 s where it is text, 1.8 s and 400 MB where it is empty objects.
"""

from __future__ import annotations

import re
from typing import Any

from proxy.errors import BadRequestError

_MAX_DEPTH = 128
# What a body may hold outside its strings: as many token ids as four prompts of a million, as many objects as very long
# conversations. Each is told by a mark.
_MOST = {b"{": 250_000, b"[": 250_000, b":": 250_000, b",": 4_000_000}
_WORDS = {b"{": "objects", b"[": "lists", b":": "names", b",": "values"}
_BYTES_PER_PART = 2  # at least
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


def refuse_crowded(raw: bytes) -> None:
    """Raise `BadRequestError` for a body of more parts than any prompt has, before it is parsed."""
    suspects = [mark for mark, most in _MOST.items() if len(raw) > _BYTES_PER_PART * most and _has_more(raw, mark)]
    if suspects:
        bare = _STRING.sub(b"", raw)
        for mark in suspects:
            if _has_more(bare, mark):
                raise BadRequestError(f"the body holds more than {_MOST[mark]:,} {_WORDS[mark]}")


def _has_more(data: bytes, mark: bytes) -> bool:
    """Tell whether there are too many; `replace` looks for rare bytes much faster than `count`."""
    most = _MOST[mark]
    return len(data) - len(data.replace(mark, b"", most + 1)) > most


def refuse_deep(raw: bytes, value: Any) -> None:
    """Raise `BadRequestError` for a body that is nested deeper than any prompt; `value` is the same parsed."""
    if _may_be_deeper(raw, _MAX_DEPTH) and _is_deeper(value, _MAX_DEPTH):
        raise BadRequestError(f"the body is nested more than {_MAX_DEPTH} deep")


def _may_be_deeper(raw: bytes, limit: int) -> bool:
    """Tell whether there are enough brackets; `find` scans a long prompt many times faster than `count`."""
    found = 0
    for bracket in (b"{", b"["):
        position = raw.find(bracket)
        while position >= 0:
            found += 1
            if found > limit:
                return True
            position = raw.find(bracket, position + 1)
    return False


def _is_deeper(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        level = [
            child
            for item in level
            for child in (item.values() if isinstance(item, dict) else item)
            if isinstance(child, dict | list)
        ]
        if not level:
            return False
    return True
