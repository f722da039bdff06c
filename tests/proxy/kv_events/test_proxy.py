"""A proxy that follows KV events, and one that does not."""

import subprocess
import sys

import orjson
import pytest

from proxy.app import create_app
from proxy.cli import _kv_events
from proxy.config import EndpointConfig, KvEventSource, ProxyConfig
from tests.stand_in.fault import Fault
from tests.stand_in.publisher import StandInPublisher, stored

ENDPOINTS = [EndpointConfig(name, f"http://{name}", "prefill") for name in ("p", "p=x", "h:8100")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([], {}),
        (["auto"], {"p": (), "p=x": (), "h:8100": ()}),
        (["p=auto"], {"p": ()}),
        (["p=tcp://a:1"], {"p": (KvEventSource("tcp://a:1"),)}),
        (["p=x=ipc://@a:1,ipc://@b:1"], {"p=x": (KvEventSource("ipc://@a:1", "ipc://@b:1"),)}),
        (
            ["h:8100=tcp://a:1", "h:8100=tcp://a:2"],
            {"h:8100": (KvEventSource("tcp://a:1"), KvEventSource("tcp://a:2"))},
        ),
        (["p=tcp://a:1", "auto"], {"p": (KvEventSource("tcp://a:1"),), "p=x": (), "h:8100": ()}),
    ],
)
def test_addresses_are_given_or_asked_for(given, expected):
    assert _kv_events(given, ENDPOINTS) == expected


async def test_events_reach_the_metrics_of_a_proxy(make_rig):
    publisher = await StandInPublisher().start()
    await publisher.publish(stored([1, 2], list(range(8))), lost=True)
    publish, replay = publisher.addresses
    given = {"p0": (KvEventSource(publish, replay),), "d0": ()}
    rig = await make_rig(kv_events=given, wait=False)
    sources = {
        "0": {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": publish, "replay_endpoint": replay}
    }
    rig.decodes[0].get_faults["/kv_event_sources"] = Fault(status=200, body=orjson.dumps(sources))
    await rig.ready()

    async def known():
        return await rig.metric("pdcluster_kv_events_blocks") == 4

    await rig.until(known)
    for name in ("current", "complete", "batches_total"):
        assert await rig.metric(f"pdcluster_kv_events_{name}") == 2
    await publisher.close()


def test_a_proxy_without_the_flag_loads_nothing_for_it():
    script = (
        "import sys; from proxy.app import create_app; from proxy.config import EndpointConfig, ProxyConfig;"
        "create_app(ProxyConfig((EndpointConfig('d', 'http://h', 'decode'),)));"
        "print([name for name in sys.modules if name.split('.')[0] in ('zmq', 'msgspec')])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_proxy_that_follows_asks_for_tokens_too():
    endpoints = (EndpointConfig("d", "http://h", "decode"),)
    services = create_app(ProxyConfig(endpoints, kv_events={"d": ()})).state.services
    assert services.tokenizer is not None
    assert services.kv_events is not None
    services = create_app(ProxyConfig(endpoints)).state.services
    assert services.tokenizer is services.kv_events is None
