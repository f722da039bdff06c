"""The key that engines ask for, where the user set one: engines, proxy and pair checks know it, nobody else sees it.

vLLM (0.32) asks for it under /v1, /v2 and /inference; /health, /metrics and /tokenize stay open. The plan only says
where an engine takes it from; the backend fills it in when it starts the engine.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable, Mapping

import httpx

from pdcluster.engine_args import ENGINE_KEY_VARIABLE
from pdcluster.errors import UserError

_KEY = re.compile(r"[\x21-\x7e]+")


def refuse_unusable_key(environment: Mapping[str, str]) -> None:
    """Raise `UserError`, without the key, where it could not be sent in a header."""
    key = environment.get(ENGINE_KEY_VARIABLE)
    if key and not _KEY.fullmatch(key):
        raise UserError(
            f"{ENGINE_KEY_VARIABLE}: has a space, a line break or a character that is not ASCII, which no HTTP header "
            "carries; set one such as `openssl rand -hex 24` makes"
        )


class EngineAuth(httpx.Auth):
    """Sends the key to the engines' addresses and to no other, so that one client can also talk to the proxy."""

    def __init__(self, environment: Mapping[str, str], engines: Iterable[str]) -> None:
        self._key = environment.get(ENGINE_KEY_VARIABLE) or None
        self._origins = {_origin(httpx.URL(url)) for url in engines}

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        """Add the header where it belongs."""
        if self._key is not None and _origin(request.url) in self._origins:
            request.headers["authorization"] = f"Bearer {self._key}"
        yield request


def _origin(url: httpx.URL) -> tuple[str, str, int | None]:
    return (url.scheme, url.host, url.port)
