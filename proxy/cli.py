"""`pdcluster proxy`: flags -> ProxyConfig -> a running server. Heavy imports wait until there is something to run."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn
from urllib.parse import urlsplit

import typer

from proxy.flags import takes_flags

if TYPE_CHECKING:
    import socket

    from proxy.api_keys import ApiKeys
    from proxy.config import EndpointConfig, KvEventSource, ProxyConfig
    from proxy.serving import ServerSettings

app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
_KIB, _MIB = 1 << 10, 1 << 20
_ZMQ_SCHEMES = ("tcp://", "ipc://")
_EPILOG = """\b
Examples:
  pdcluster proxy --prefill http://10.0.0.1:8100 --decode http://10.0.0.2:8100
  pdcluster proxy --prefill p0=http://10.0.0.1:8100 --decode d0=http://10.0.0.2:8100 --port 8080
  pdcluster proxy ... --host 0.0.0.0 --api-key-file keys.yaml --tls-certificate chain.pem --tls-key key.pem
  pdcluster proxy ... --workers 4 --admin-port 8001
  pdcluster proxy ... --kv-events auto
  pdcluster proxy ... --kv-events p0=tcp://10.0.0.1:5557,tcp://10.0.0.1:6557
Clients' keys are read from --api-key-file or PDCLUSTER_API_KEYS (name=key,name2=key2), the engines' own key, where
they have one, from PDCLUSTER_ENGINE_API_KEY."""


class UsageError(Exception):
    """What the user gave cannot be used; the message says what, where and what to do."""


def _proxy(flags: dict[str, Any]) -> None:
    """Put one OpenAI-compatible endpoint in front of prefill and decode engines of vLLM."""
    from proxy.config import ClientLimits, ProxyConfig, SchedulingConfig, Timeouts

    names = _endpoints(flags["prefill"] or [], "prefill") + _endpoints(flags["decode"] or [], "decode")
    _check(names, flags["connector"], flags["fallback"], flags["log_level"])
    config = ProxyConfig(
        endpoints=tuple(names),
        excluded_pairs=frozenset(_pair(text, names) for text in flags["exclude_pair"] or []),
        connector=flags["connector"],
        fallback="none" if flags["fallback"] == "none" else "decode",
        limits=ClientLimits(
            head_seconds=flags["client_head_timeout"],
            body_seconds=flags["client_body_timeout"],
            write_seconds=flags["client_write_timeout"],
            head_bytes=flags["max_header_kb"] * _KIB,
            body_bytes=flags["max_body_mb"] * _MIB,
        ),
        timeouts=Timeouts(
            connect=flags["connect_timeout"],
            prefill=flags["prefill_timeout"] or None,
            headers=flags["header_timeout"] or None,
            idle=flags["idle_timeout"] or None,
            total=flags["total_timeout"] or None,
        ),
        scheduling=SchedulingConfig(
            ttft_ms=flags["ttft_ms"],
            ttft_per_token_ms=flags["ttft_per_token_ms"],
            tpot_ms=flags["tpot_ms"],
            queue_size=flags["queue_size"],
            queue_seconds=flags["queue_timeout"],
            prefix_tokens=flags["prefix_cache_tokens"],
            seats=flags["decode_seats"],
        ),
        lease_seconds=flags["lease_seconds"],
        health_interval=flags["health_interval"],
        engine_api_key=os.environ.get("PDCLUSTER_ENGINE_API_KEY") or None,
        api_keys=_api_keys(flags),
        cors_origins=tuple(flags["cors_origin"] or ()),
        kv_events=_kv_events(flags["kv_events"] or [], names),
    )
    _check_tls(flags)
    if not flags["check"]:
        _serve(config, flags)


app.command(name="proxy", epilog=_EPILOG)(takes_flags(_proxy))


def main() -> NoReturn:
    """Run the command; a user's mistake is one line and exit code 2."""
    try:
        app(prog_name="pdcluster proxy")
    except UsageError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(0)


def _endpoints(given: list[str], role: Literal["prefill", "decode"]) -> list[EndpointConfig]:
    from proxy.config import EndpointConfig

    found = []
    for text in given:
        name, separator, url = text.partition("=")
        if not separator or "/" in name:
            name, url = "", text
        parts = urlsplit(url)
        try:
            known_port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            known_port = 0
        known = parts.scheme in ("http", "https") and parts.hostname and known_port
        if not known or parts.query or parts.fragment or parts.username:
            raise UsageError(
                f"--{role} {text}: not a URL; give one such as http://10.0.0.1:8100, with NAME= before it or not"
            )
        found.append(EndpointConfig(name or f"{parts.hostname}:{known_port}", url.rstrip("/"), role))
    return found


def _check(endpoints: list[EndpointConfig], connector: str, fallback: str, log_level: str) -> None:
    from proxy.connectors import CONNECTORS

    if not any(endpoint.role == "decode" for endpoint in endpoints):
        raise UsageError("--decode: at least one decode engine is needed, such as --decode http://10.0.0.2:8100")
    if fallback not in ("decode", "none"):
        raise UsageError(f"--fallback {fallback}: must be decode or none")
    if fallback == "none" and not any(endpoint.role == "prefill" for endpoint in endpoints):
        raise UsageError("--fallback none: without a prefill engine nothing could be served; give --prefill")
    if connector not in CONNECTORS:
        raise UsageError(f"--connector {connector}: unknown; there is: {', '.join(CONNECTORS)}")
    if log_level not in ("debug", "info", "warning", "error"):
        raise UsageError(f"--log-level {log_level}: must be debug, info, warning or error")
    for key in ("name", "url"):
        values = [getattr(endpoint, key) for endpoint in endpoints]
        twice = next((value for value in values if values.count(value) > 1), None)
        if twice is not None:
            raise UsageError(f"{twice}: two endpoints have this {key}; each needs its own")


def _pair(text: str, endpoints: list[EndpointConfig]) -> tuple[str, str]:
    """Parse PREFILL:DECODE; names may hold colons, so every cut is tried."""
    names = {role: {item.name for item in endpoints if item.role == role} for role in ("prefill", "decode")}
    for index, character in enumerate(text):
        if character == ":" and text[:index] in names["prefill"] and text[index + 1 :] in names["decode"]:
            return text[:index], text[index + 1 :]
    known = f"prefill {sorted(names['prefill'])}, decode {sorted(names['decode'])}"
    raise UsageError(f"--exclude-pair {text}: must be PREFILL:DECODE of these names: {known}")


def _kv_events(given: list[str], endpoints: list[EndpointConfig]) -> dict[str, tuple[KvEventSource, ...]]:
    """Parse auto, NAME=auto and NAME=ADDRESS[,REPLAY]; of several addresses of one name the n-th is rank n."""
    from proxy.config import KvEventSource

    names = sorted((item.name for item in endpoints), key=len, reverse=True)
    found: dict[str, tuple[KvEventSource, ...]] = {}
    for text in given:
        if text == "auto":
            found = dict.fromkeys(names, ()) | found
            continue
        name = next((name for name in names if text.startswith(f"{name}=")), None)
        if name is None:
            raise UsageError(f"--kv-events {text}: must be auto, or begin with NAME= of one of {sorted(names)}")
        publish, _, replay = text[len(name) + 1 :].partition(",")
        for address in (publish, replay or publish):
            if publish != "auto" and not address.startswith(_ZMQ_SCHEMES):
                raise UsageError(
                    f"--kv-events {text}: {address or 'nothing'} is no address; give one such as tcp://10.0.0.1:5557, "
                    "or auto"
                )
        found[name] = () if publish == "auto" else (*found.get(name, ()), KvEventSource(publish, replay or None))
    return found


def _listen(host: str, port: int, flag: str) -> socket.socket:
    """Bind before anything else starts, so that a taken port is one clear line."""
    import socket

    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise UsageError(f"{flag}: cannot listen on {host} port {port}: {reason}; choose another port") from error
    return listener


def _api_keys(flags: dict[str, Any]) -> ApiKeys | None:
    """Return the keys of the file or the environment; limits without keys would do nothing and are refused."""
    from proxy.api_keys import KeyFileError, load_key_file, parse_key_list

    path, text = flags["api_key_file"], os.environ.get("PDCLUSTER_API_KEYS")
    limits = (flags["requests_per_minute"], flags["tokens_per_minute"])
    try:
        if path is not None:
            keys, warnings = load_key_file(Path(path), *limits)
            for warning in warnings:
                typer.echo(f"warning: {warning}", err=True)
            return keys
        if text is not None:
            return parse_key_list(text, *limits)
    except KeyFileError as error:
        raise UsageError(str(error)) from None
    if limits != (None, None):
        raise UsageError("--requests-per-minute, --tokens-per-minute: they are for each API key; give --api-key-file")
    return None


def _check_tls(flags: dict[str, Any]) -> None:
    from proxy.tls import check_tls

    certificate, key, client_ca = flags["tls_certificate"], flags["tls_key"], flags["tls_client_ca"]
    if certificate is None:
        if key or client_ca:
            raise UsageError("--tls-key, --tls-client-ca: need --tls-certificate")
        return
    try:
        check_tls(certificate, key, client_ca)
    except OSError as error:
        reason = error.strerror or str(error)
        raise UsageError(f"--tls-certificate {certificate}: cannot be used with --tls-key and CA: {reason}") from None


def _serve(config: ProxyConfig, flags: dict[str, Any]) -> None:
    """Bind, then serve in this process or in several."""
    listener = _listen(flags["host"], flags["port"], "--host --port")
    admin = _listen(flags["admin_host"], flags["admin_port"], "--admin-port") if flags["admin_port"] else None
    count = flags["workers"]
    if count == 1:
        from proxy.serving import serve

        serve(config, _settings(flags, listener, admin))
        return
    import tempfile

    from proxy.app import shared_counts
    from proxy.serving import serve, set_up_logging, spare_collector
    from proxy.workers import Workers

    set_up_logging(flags["log_level"])
    counts, settings = shared_counts(config, count), _settings(flags, listener, admin)
    with tempfile.TemporaryDirectory(prefix="pdcluster-proxy-") as directory:
        kv_store = Path(directory) / "kv_transfer.json"
        spare_collector()
        Workers(counts, lambda: serve(config, settings, counts, kv_store), flags["shutdown_grace"]).serve()


def _settings(flags: dict[str, Any], listener: socket.socket, admin: socket.socket | None) -> ServerSettings:
    from proxy.serving import ServerSettings

    return ServerSettings(
        listener=listener,
        admin=admin,
        certificate=flags["tls_certificate"],
        key=flags["tls_key"],
        client_ca=flags["tls_client_ca"],
        grace=flags["shutdown_grace"],
        log_level=flags["log_level"],
    )
