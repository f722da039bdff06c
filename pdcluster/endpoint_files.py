"""Files that the endpoint needs (keys, certificate, private key, clients' CA), tried before anything starts."""

from __future__ import annotations

import ssl
from collections.abc import Iterator, Mapping
from pathlib import Path

from pdcluster.errors import Problem
from pdcluster.spec import ProxySpec

CLIENT_KEYS_VARIABLE = "PDCLUSTER_API_KEYS"


def find_endpoint_problems(proxy: ProxySpec, environment: Mapping[str, str]) -> list[Problem]:
    """Return a problem for each file that cannot be used, and for limits a key without any key."""
    files = ("api_key_file", "tls_certificate", "tls_key", "tls_client_ca")
    unreadable = [problem for name in files for problem in _unreadable(f"proxy.{name}", getattr(proxy, name))]
    return [*unreadable, *(() if unreadable else _bad_tls(proxy)), *_limits_without_keys(proxy, environment)]


def _unreadable(where: str, path: Path | None) -> Iterator[Problem]:
    if path is None:
        return
    try:
        with path.open("rb") as file:
            empty = not file.read(1)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        yield Problem(where, f"{path}: cannot be read: {reason}", "check the path and who may read it")
    else:
        if empty:
            yield Problem(where, f"{path}: is empty", "write the file first")


def _bad_tls(proxy: ProxySpec) -> Iterator[Problem]:
    """Load the files as the server will; OpenSSL's own reasons say little, so the advice names what to look at."""
    if proxy.tls_certificate is None or proxy.tls_key is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # A key with a passphrase would make OpenSSL ask on the terminal.
        context.load_cert_chain(proxy.tls_certificate, proxy.tls_key, password=lambda: b"")
    except (ssl.SSLError, ValueError) as error:
        mismatch = "mismatch" in str(error).lower()
        what = "is not the key of" if mismatch else "cannot be loaded together with"
        advice = (
            "give the two files that were issued together"
            if mismatch
            else "both must be PEM: the certificate with its chain, and its private key without a passphrase"
        )
        yield Problem("proxy.tls_key", f"{proxy.tls_key}: {what} {proxy.tls_certificate}", advice)
    if proxy.tls_client_ca is not None:
        try:
            context.load_verify_locations(proxy.tls_client_ca)
        except ssl.SSLError:
            what = f"{proxy.tls_client_ca}: holds no certificate in PEM"
            yield Problem("proxy.tls_client_ca", what, "give the CA that signs your clients' certificates")


def _limits_without_keys(proxy: ProxySpec, environment: Mapping[str, str]) -> Iterator[Problem]:
    if proxy.api_key_file is not None or environment.get(CLIENT_KEYS_VARIABLE):
        return
    for name in ("requests_per_minute", "tokens_per_minute"):
        if getattr(proxy, name) is not None:
            advice = f"set proxy.api_key_file or {CLIENT_KEYS_VARIABLE}, or remove the limit"
            yield Problem(f"proxy.{name}", "is a limit for each API key, and there is no key", advice)
