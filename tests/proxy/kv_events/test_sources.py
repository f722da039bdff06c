"""Where engines publish, as they say themselves."""

import orjson
import pytest

from proxy.config import KvEventSource as Source
from proxy.kv_events.sources import read_sources

ITEM = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://*:5557",
    "replay_endpoint": "tcp://*:6557",
    "buffer_steps": 10_000,
    "topic": "t",
}


def read(value, url="http://10.0.0.7:8100/prefix"):
    return read_sources(orjson.dumps(value), url)


def test_an_engine_that_listens_everywhere_is_found_where_its_server_is():
    assert read({"0": ITEM}) == {0: Source("tcp://10.0.0.7:5557", "tcp://10.0.0.7:6557", "t")}
    assert read({"0": ITEM}, "http://[fd00::1]:8100")[0].publish == "tcp://[fd00::1]:5557"


def test_each_rank_has_its_own():
    ranks = {str(rank): {**ITEM, "endpoint": f"ipc://@a-tcp:{5557 + rank}", "replay_endpoint": None} for rank in (0, 1)}
    assert read(ranks) == {0: Source("ipc://@a-tcp:5557", None, "t"), 1: Source("ipc://@a-tcp:5558", None, "t")}


@pytest.mark.parametrize("more", [{"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_one_that_publishes_nothing_has_none(more):
    assert read({"0": {**ITEM, **more}}) == {}
    assert read({}) == {}


@pytest.mark.parametrize("value", [[], "x", None, {"a": ITEM}, {"0": 5}, {"0": {**ITEM, "endpoint": None}}])
def test_anything_else_is_refused_in_words(value):
    with pytest.raises(ValueError, match="/kv_event_sources"):
        read(value)
    with pytest.raises(ValueError, match="/kv_event_sources"):
        read_sources(b"<html>", "http://h")
