"""The one boundary where the HTTP library's errors are translated."""

import httpx
import pytest

from proxy.config import EndpointConfig
from proxy.endpoints import Endpoint
from proxy.engine_client import Limit, _translated
from proxy.errors import EngineFailedError, EngineTimeoutError

ENDPOINT = Endpoint(EndpointConfig("d0", "http://h", "decode"))


def every(kind):
    return {kind}.union(*(every(child) for child in kind.__subclasses__()))


@pytest.mark.parametrize(
    "kind", sorted(every(httpx.HTTPError) | every(httpx.StreamError) | {httpx.InvalidURL}, key=str), ids=str
)
def test_each_error_of_the_http_library_is_translated(kind):
    error = kind.__new__(kind)  # constructors differ
    with pytest.raises(EngineFailedError, match="decode: d0"), _translated(ENDPOINT, "decode", Limit(5)):
        raise error


def test_a_refused_connection_is_told_from_one_that_broke():
    with pytest.raises(EngineFailedError) as refused, _translated(ENDPOINT, "decode", Limit(5)):
        raise httpx.ConnectError("no")
    with pytest.raises(EngineFailedError) as broken, _translated(ENDPOINT, "decode", Limit(5)):
        raise ConnectionResetError
    assert refused.value.refused
    assert not broken.value.refused


@pytest.mark.parametrize(
    ("limit", "words", "counts"),
    [(Limit(5), "gave nothing for 5 s", True), (Limit(3, 60), "was not done within the request's 60 s", False)],
    ids=["phase", "total"],
)
def test_a_timeout_says_which_limit_was_reached_and_blames_only_for_the_engines_own(limit, words, counts):
    with pytest.raises(EngineTimeoutError, match=words) as caught, _translated(ENDPOINT, "prefill", limit):
        raise TimeoutError
    assert caught.value.counts is counts
    assert caught.value.status == 504
