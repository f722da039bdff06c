"""Wrong names, and the nearest right ones. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_SCREEN = 40


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return "did you mean X?" for the nearest known name, "" where none is near."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {close[0]}?" if close else ""


def unknown(kind: str, name: str, known: Sequence[str]) -> str:
    """Say that a name is unknown, with the nearest one and, of a short list, all of them."""
    hint = did_you_mean(name, known)
    if not hint:  # the owner may be missing or differ in case
        tail = name.rpartition("/")[2].lower()
        near = [item for item in known if item.rpartition("/")[2].lower() == tail]
        hint = f"did you mean {near[0]}?" if near else ""
    listed = "known: " + ", ".join(known) if len(known) <= _SCREEN or not hint else ""
    return f"{kind} {name}: unknown; " + " ".join(part for part in (hint, listed) if part)
