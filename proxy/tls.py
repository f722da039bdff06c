"""Whether the files for TLS can be used."""

from __future__ import annotations

import ssl


def check_tls(certificate: str, key: str | None, client_ca: str | None) -> None:
    """Raise `OSError` (of which `ssl.SSLError` is one) where the files cannot be used."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    if client_ca is not None:
        context.load_verify_locations(client_ca)
