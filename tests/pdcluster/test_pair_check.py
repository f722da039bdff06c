import itertools
import json

import httpx
import pytest

from pdcluster.pair_check import Answer, Engine, PairChecker, first_difference, pair_rounds, transferred_bytes
from pdcluster.warmup import WarmUp

P, D = Engine("prefill-0", "http://p"), Engine("decode-0", "http://d")
HANDOFF = {"do_remote_prefill": True, "remote_engine_id": "e"}


class FakePair:
    """Answers as a pair does; what it was sent is in `bodies`."""

    def __init__(self, *, remote_tokens=(1, 2, 3), moves=True, prefill=None, decode_failures=0):
        self.remote_tokens = list(remote_tokens)
        self.moves = moves
        self.prefill = prefill or (lambda: httpx.Response(200, json={"kv_transfer_params": HANDOFF}))
        self.decode_failures = decode_failures
        self.moved = 0
        self.bodies = []

    def __call__(self, request):
        if request.url.path == "/metrics":
            return httpx.Response(200, text=f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {self.moved}\n')
        body = json.loads(request.content)
        self.bodies.append((request.url.host, body))
        if request.url.host == "p":
            return self.prefill()
        tokens = [1, 2, 3]
        if "kv_transfer_params" in body:
            if self.decode_failures:
                self.decode_failures -= 1
                return httpx.Response(500, text="handshake timed out")
            tokens = self.remote_tokens
            self.moved += 4096 if self.moves else 0
        tops = [{"a": -0.1, "b": -3.0} for _ in tokens]
        return httpx.Response(200, json={"choices": [{"token_ids": tokens, "logprobs": {"top_logprobs": tops}}]})

    def run(self, *, enforce=True):
        numbers = itertools.count()
        with httpx.Client(transport=httpx.MockTransport(self)) as client:
            checker = PairChecker(client, "m", 1e-4, lambda: f"salt-{next(numbers)}")
            return WarmUp(checker, workers=2, enforce=enforce).check([[(P, D)]])[0]


@pytest.fixture(autouse=True)
def short_metric_wait(monkeypatch):
    monkeypatch.setattr("pdcluster.pair_check._METRIC_WAIT_S", 0.0)


def test_a_pair_that_gives_the_aggregated_answer_over_moved_kv_is_good():
    result = FakePair().run()
    assert (result.ok, result.detail, result.kv_bytes) == (True, "equal", 4096)


def test_a_pair_whose_answer_differs_is_not():
    result = FakePair(remote_tokens=(1, 9, 3)).run()
    assert not result.ok
    assert result.detail == "token 1 differs from the aggregated answer"


def test_a_differing_answer_is_only_reported_where_parity_is_off():
    result = FakePair(remote_tokens=(1, 9, 3)).run(enforce=False)
    assert result.ok
    assert result.detail.startswith("not enforced")


def test_a_pair_that_moves_no_kv_is_not_good_even_where_parity_is_off():
    result = FakePair(moves=False).run(enforce=False)
    assert not result.ok
    assert "no KV came over NIXL" in result.detail


def test_a_failed_handshake_is_tried_again_with_a_new_prefill():
    pair = FakePair(decode_failures=2)
    assert pair.run().ok
    assert sum(host == "p" for host, _ in pair.bodies) == 3


def test_a_pair_that_keeps_failing_says_which_leg_and_why():
    result = FakePair(decode_failures=9).run()
    assert result.detail == "decode on decode-0: HTTP 500: handshake timed out"
    result = FakePair(prefill=lambda: httpx.Response(200, json={"kv_transfer_params": None})).run()
    assert result.detail == "prefill on prefill-0: the reply has no kv_transfer_params"


def test_no_run_can_read_the_prefix_cache_of_another():
    pair = FakePair()
    pair.run()
    salts = [(host, body["cache_salt"]) for host, body in pair.bodies]
    assert [host for host, _ in salts] == ["d", "p", "d"]
    assert salts[0][1] != salts[1][1] == salts[2][1]


def test_a_difference_is_excused_only_where_both_sides_were_tied():
    left, right = Answer((1, 2, 3), (1.0, 1e-5, 1.0)), Answer((1, 7, 8), (1.0, 1e-5, 1.0))
    assert first_difference(left, right, 1e-4) is None
    assert first_difference(left, Answer((1, 7, 8), (1.0, 0.5, 1.0)), 1e-4) == 1
    assert first_difference(left, Answer((1, 2), (1.0, 1.0)), 1e-4) == 2
    assert first_difference(left, left, 1e-4) is None


@pytest.mark.parametrize(("prefills", "decodes"), [(1, 1), (2, 4), (4, 2), (3, 3), (3, 5)])
def test_rounds_hold_every_pair_once_and_no_engine_twice(prefills, decodes):
    ps = [Engine(f"p{i}", "") for i in range(prefills)]
    ds = [Engine(f"d{i}", "") for i in range(decodes)]
    rounds = pair_rounds(ps, ds)
    pairs = [(left.name, right.name) for pairs in rounds for left, right in pairs]
    assert sorted(pairs) == sorted(itertools.product([p.name for p in ps], [d.name for d in ds]))
    for pairs in rounds:
        names = [engine.name for pair in pairs for engine in pair]
        assert len(names) == len(set(names))


def test_transferred_bytes_are_summed_over_ranks_and_zero_where_absent():
    text = 'vllm:nixl_bytes_transferred_sum{engine="0"} 10.0\nvllm:nixl_bytes_transferred_sum{engine="1"} 5.0\n'
    assert transferred_bytes(text) == 15
    assert transferred_bytes("# nothing\n") == 0
