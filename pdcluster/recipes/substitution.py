"""A recipe's variables in argv and environment, and their values: `$HEAD_IP`, `$((GPUS_PER_NODE*2))`. Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping

VARIABLE = re.compile(r"\$(?:\(\((?P<sum>[A-Z][A-Z0-9_]*(?:[*/][0-9]+)*)\)\)|(?P<name>[A-Z][A-Z0-9_]*))")
_UNSAFE = re.compile(r'["\\`$]')


def variables_in(text: str) -> list[str]:
    """Return the names of the variables in a text, in order."""
    return [re.split(r"[*/]", match["sum"])[0] if match["sum"] else match["name"] for match in VARIABLE.finditer(text)]


def substitute(text: str, values: Mapping[str, str]) -> str:
    """Put values in place of variables; one without a value stays. Arithmetic is done, rounding down."""

    def put(match: re.Match[str]) -> str:
        if match["name"]:
            return values.get(match["name"], match[0])
        name, *steps = re.split(r"([*/])", match["sum"])
        if name not in values:
            return match[0]
        result = int(values[name])
        for sign, number in zip(steps[::2], steps[1::2], strict=True):
            result = result * int(number) if sign == "*" else result // int(number)
        return str(result)

    return VARIABLE.sub(put, text)


def shell_quote(token: str) -> str:
    """Quote a token for a POSIX shell, but let the recipe's own variables be variables of the shell."""
    if not VARIABLE.search(token):
        return shlex.quote(token)
    parts, last = [], 0
    for match in VARIABLE.finditer(token):
        parts += [_UNSAFE.sub(r"\\\g<0>", token[last : match.start()]), match[0]]
        last = match.end()
    parts.append(_UNSAFE.sub(r"\\\g<0>", token[last:]))
    return f'"{"".join(parts)}"'
