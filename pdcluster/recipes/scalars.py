"""A token or an environment value that YAML read as a number or a truth value, as the text a process sees. Pure."""

from __future__ import annotations


def as_text(value: object) -> str:
    """Return the text of a scalar: true and false in lower case, as vLLM and JSON write them."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value)
