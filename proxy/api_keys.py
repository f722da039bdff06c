"""Keys of the proxy's clients: read from a file or the environment, found by their hash, never shown.

File: YAML, a mapping from a name to the key, or to `{key, requests_per_minute, tokens_per_minute, priority, weight,
ttft_ms}`: a lower priority is served first, one with twice the weight gets twice the tokens while others wait, and
`ttft_ms` is by when a first token is wanted. Environment: `name=key,name2=key2`. Names appear in metrics and logs, keys
nowhere.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

_SHORTEST = 8
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_LIMITS = ("requests_per_minute", "tokens_per_minute")
_FIELDS = ("key", *_LIMITS, "priority", "weight", "ttft_ms")
_PRIORITIES = range(-100, 101)


class KeyFileError(ValueError):
    """Keys cannot be used; the message says where and what to do, and never shows one."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A client's key. `index` is its place among all, limits are None where there are none.

    What the rest means is said in `scheduling.job`.
    """

    name: str
    index: int
    digest: bytes = field(repr=False)
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    priority: int = 0
    weight: float = 1.0
    ttft_ms: float | None = None


class ApiKeys:
    """All keys."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        self._keys = {key.digest: key for key in keys}

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[ApiKey]:
        return iter(self._keys.values())

    def find(self, presented: bytes) -> ApiKey | None:
        """Return the key that was presented. What is compared are hashes: how long it takes tells nothing of a key."""
        digest = hashlib.sha256(presented).digest()
        key = self._keys.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def presented_key(headers: Mapping[bytes, bytes]) -> bytes | None:
    """Return the key of `Authorization: Bearer KEY`, or of `x-api-key`, as clients of Anthropic's API send it."""
    given = headers.get(b"authorization")
    if given is not None and given[:7].lower() == b"bearer ":
        value = given[7:].strip()
        if value:
            return value
    return headers.get(b"x-api-key") or None


def load_key_file(path: Path, requests: int | None = None, tokens: int | None = None) -> tuple[ApiKeys, list[str]]:
    """Return the keys of a file and warnings about it; the limits are those of keys that have none of their own."""
    try:
        text = path.read_text(encoding="utf-8")
        readable = path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise KeyFileError(f"{path}: cannot be read: {reason}") from error
    try:
        entries = yaml.safe_load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise KeyFileError(f"{path}: is not YAML{where}; write one `name: key` a line") from None
    if not isinstance(entries, dict) or not entries:
        raise KeyFileError(f"{path}: must be a mapping of names to keys; write one `name: key` a line")
    keys = [
        _key(f"{path}: {name}", str(name), entry, index, (requests, tokens))
        for index, (name, entry) in enumerate(entries.items())
    ]
    warnings = [f"{path}: others can read it; chmod 600 it"] if readable else []
    return _without_twins(keys, str(path)), warnings


def parse_key_list(text: str, requests: int | None = None, tokens: int | None = None) -> ApiKeys:
    """Return the keys of `name=key,name2=key2`; a key without a name is called key-1, key-2 and so on."""
    keys = []
    for index, part in enumerate(part.strip() for part in text.split(",") if part.strip()):
        name, mark, value = part.partition("=")
        if not mark:
            name, value = f"key-{index + 1}", part
        where = f"PDCLUSTER_API_KEYS: entry {index + 1}"
        keys.append(_key(where, name.strip(), value.strip(), index, (requests, tokens)))
    if not keys:
        raise KeyFileError("PDCLUSTER_API_KEYS: is empty; set name=key,name2=key2, or unset it")
    return _without_twins(keys, "PDCLUSTER_API_KEYS")


def _key(where: str, name: str, entry: Any, index: int, limits: tuple[int | None, int | None]) -> ApiKey:
    values = entry if isinstance(entry, dict) else {"key": entry}
    unknown = [str(field) for field in values if field not in _FIELDS]
    if unknown:
        raise KeyFileError(f"{where}: unknown field {unknown[0]}; there are {', '.join(_FIELDS)}")
    if not _NAME.fullmatch(name):
        raise KeyFileError(f"{where}: a name has letters, digits, dot, dash and underscore, at most 64")
    secret = values.get("key")
    if not isinstance(secret, str) or len(secret) < _SHORTEST or not re.fullmatch(r"[!-~]+", secret):
        raise KeyFileError(
            f"{where}: a key is a string of at least {_SHORTEST} printable characters without spaces; quote it"
        )
    own = []
    for field_name, default in zip(_LIMITS, limits, strict=True):
        limit = values.get(field_name, default)
        if limit is not None and (not isinstance(limit, int) or isinstance(limit, bool) or limit < 1):
            raise KeyFileError(f"{where}: {field_name} must be a whole number from 1")
        own.append(limit)
    digest = hashlib.sha256(secret.encode()).digest()
    return ApiKey(name, index, digest, own[0], own[1], *_service(where, values))


def _service(where: str, values: Mapping[str, Any]) -> tuple[int, float, float | None]:
    """Return how a key is served: its priority, its weight, and the target for its first tokens."""
    priority, weight, ttft = values.get("priority", 0), values.get("weight", 1.0), values.get("ttft_ms")
    if type(priority) is not int or priority not in _PRIORITIES:
        raise KeyFileError(f"{where}: priority must be a whole number from -100 (first) to 100")
    for name, value in (("weight", weight), ("ttft_ms", ttft)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise KeyFileError(f"{where}: {name} must be a number over 0")
    return priority, float(weight), ttft


def _without_twins(keys: list[ApiKey], where: str) -> ApiKeys:
    names = [key.name for key in keys]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise KeyFileError(f"{where}: two keys are called {twice}; give each a name of its own")
    found = ApiKeys(keys)
    if len(found) < len(keys):
        raise KeyFileError(f"{where}: one key stands there under two names; give each client its own")
    return found
