"""Ask a running cluster one question: print the answer, the time to its first token, and how much KV moved for it.

usage: python deploy/ask.py URL QUESTION [CERTIFICATE]

CERTIFICATE (PEM) is what an https URL is verified against: the endpoint's own certificate or the CA that signed it. An
API key, where the endpoint asks for one, is read from PDCLUSTER_API_KEY.
"""

from __future__ import annotations

import json
import os
import ssl
import sys
import time

import httpx
from prometheus_client.parser import text_string_to_metric_families

_WAIT_S = 10.0


def main(url: str, question: str, certificate: str | None = None) -> int:
    """Ask and print; returns 1 where no KV moved, since that is what the cluster is for."""
    key = os.environ.get("PDCLUSTER_API_KEY")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    verify = trusted(certificate) if certificate else True
    with httpx.Client(base_url=url, timeout=120.0, trust_env=False, headers=headers, verify=verify) as client:
        model = client.get("/v1/models").raise_for_status().json()["data"][0]["id"]
        before = kv_bytes(client)
        answer, first = ask(client, model, question)
        moved = wait_for_growth(client, before)
    print(f"question: {question}\nanswer:   {answer.strip()}\nTTFT:     {first * 1000:.0f} ms")
    print(f"KV moved: {moved:,.0f} bytes from prefill to decode over NIXL")
    return 0 if moved > 0 else 1


def trusted(certificate: str) -> ssl.SSLContext:
    """Return what verifies a server against one certificate, which need not be a CA's."""
    context = ssl.create_default_context(cafile=certificate)
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


def ask(client: httpx.Client, model: str, question: str) -> tuple[str, float]:
    """Stream a chat completion; returns the text and the seconds to its first token."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": question}],
        "max_tokens": 48,
        "temperature": 0,
        "stream": True,
    }
    began = time.monotonic()
    text, first = "", 0.0
    with client.stream("POST", "/v1/chat/completions", json=body) as reply:
        if reply.is_error:
            reply.read()
            sys.exit(f"error: HTTP {reply.status_code}: {reply.text}")
        for line in reply.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            if "error" in event:
                sys.exit(f"error: {event['error']}")
            piece = event["choices"][0]["delta"].get("content") if event.get("choices") else None
            if piece:
                first = first or time.monotonic() - began
                text += piece
    return text, first


def kv_bytes(client: httpx.Client) -> float:
    """Return the bytes of KV moved so far, from the proxy's metrics."""
    families = text_string_to_metric_families(client.get("/metrics").raise_for_status().text)
    return sum(
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == "pdcluster_kv_transfer_bytes_sum"
    )


def wait_for_growth(client: httpx.Client, before: float) -> float:
    """Return how much more moved; engines publish it a moment after the answer."""
    deadline = time.monotonic() + _WAIT_S
    while (grown := kv_bytes(client) - before) <= 0 and time.monotonic() < deadline:
        time.sleep(0.5)
    return grown


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(__doc__)
    sys.exit(main(*sys.argv[1:]))
