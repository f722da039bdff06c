"""vLLM's flags and fields that came, went or were renamed, by version, and those that belong to plugins. Pure.

Read in the parser of vLLM 0.32.0, against the arguments that recipes of 2026 still pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Cause = Literal["newer flag", "older flag", "plugin flag", "error in recipe"]


@dataclass(frozen=True, slots=True)
class FlagFact:
    """What is known of a flag or field that a parser may refuse: `absent` is a version seen without it."""

    cause: Cause
    absent: str
    instead: str


# A flag, or flag.field for a key of a JSON flag.
FLAG_FACTS: Mapping[str, FlagFact] = {
    "--tool-call-parser-plugin": FlagFact("older flag", "0.32.0", "it is --tool-parser-plugin now"),
    "--disable-log-requests": FlagFact("older flag", "0.32.0", "leave it out: requests are not logged by default"),
    "--attention-config.use_fp4_indexer_cache": FlagFact("older flag", "0.32.0", "the field is indexer_kv_dtype now"),
    "--compilation-config.use_inductor": FlagFact("older flag", "0.32.0", "leave it out; backend and mode decide"),
    "--chat-template": FlagFact(
        "error in recipe", "0.32.0", "a file of vLLM's source tree: give its absolute path, or start there"
    ),
    "--omni": FlagFact("plugin flag", "0.32.0", "it belongs to vllm-omni, which must be installed beside vLLM"),
}


def parse_version(text: str) -> tuple[int, ...]:
    """Return the numbers of a version: "0.32.0rc1" is (0, 32, 0); what isn't a number ends it."""
    numbers = []
    for part in text.split("+", maxsplit=1)[0].split("."):
        digits = ""
        for character in part:
            if not character.isdigit():
                break
            digits += character
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def is_older(version: str, floor: str) -> bool:
    """Tell whether a version is below a floor; 0.29 equals 0.29.0."""
    one, other = parse_version(version), parse_version(floor)
    length = max(len(one), len(other))
    return one + (0,) * (length - len(one)) < other + (0,) * (length - len(other))
