"""Probes of engines' health."""

import asyncio

from proxy.config import EndpointConfig
from proxy.endpoints import Endpoint, Pools
from proxy.engine_client import EngineReply
from proxy.load import Watcher


class FakeClient:
    """Plays one answer or error a probe, the last for ever."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.enough = asyncio.Event()

    async def get(self, endpoint, path, limit, headers):
        if len(self.answers) == 1:
            self.enough.set()
            answer = self.answers[0]
        else:
            answer = self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return EngineReply(answer, {}, b"")


async def test_a_bug_in_one_probe_does_not_end_the_probing(caplog):
    seen = []
    pools = Pools(
        (Endpoint(EndpointConfig("d0", "http://h", "decode")),), frozenset(), lambda e, _: seen.append(e.state)
    )
    client = FakeClient(200, RuntimeError("bug"), 200, 200)
    watcher = Watcher(pools, client, 0.0, {}, lambda: 0.0)
    running = asyncio.create_task(watcher.run())
    await asyncio.wait_for(client.enough.wait(), 5)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert seen == ["ready", "unhealthy", "ready"]
    assert "bug while probing d0" in caplog.text


async def test_silence_must_repeat_before_an_endpoint_is_out():
    from proxy.errors import EngineTimeoutError

    endpoint = Endpoint(EndpointConfig("d0", "http://h", "decode"), state="ready")
    pools = Pools((endpoint,))
    watcher = Watcher(pools, FakeClient(EngineTimeoutError("silent")), 1.0, {}, lambda: 0.0)
    await watcher.probe(endpoint)
    assert endpoint.state == "ready"
    await watcher.probe(endpoint)
    assert endpoint.state == "unhealthy"
