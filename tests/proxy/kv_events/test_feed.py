"""Engines' events as they come over the wire, and what the index makes of them."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.kv_events.feed import Feed
from proxy.kv_events.wire import END_OF_REPLAY, BatchDecoder, sequence_of
from proxy.scheduling.block_index import BlockIndex, Publisher, pack
from tests.stand_in.publisher import batch, cleared, removed, stored

P0 = Publisher(0)


class Fed:
    def __init__(self, *events):
        self.index = BlockIndex()
        self.feed = Feed(self.index, P0)
        self.take(*events)

    def take(self, *events):
        self.feed.take(BatchDecoder().decode(batch(*events)))

    def cached(self, ids, **key):
        return self.index.cached(pack([*ids, 0]), **key).get(P0, 0)


def test_hashes_may_be_bytes_or_integers():
    long = [bytes([number]) * 32 for number in (1, 2)]
    for hashes in ([1, 2], [1 << 63, (1 << 64) - 1], long):
        fed = Fed(stored(hashes[:1], [1, 2, 3, 4]), stored(hashes[1:], [5, 6, 7, 8], parent=hashes[0]))
        assert fed.cached(range(1, 9)) == 8
        fed.take(removed(hashes[1:]))
        assert fed.cached(range(1, 9)) == 4


def test_blocks_in_other_memory_do_not_count():
    fed = Fed(stored([1], [1, 2, 3, 4], medium="CPU"))
    assert fed.cached([1, 2, 3, 4]) == 0
    fed.take(stored([1], [1, 2, 3, 4]), removed([1], medium="CPU"))
    assert fed.cached([1, 2, 3, 4]) == 4
    fed.take(removed([1], medium=None))
    assert fed.cached([1, 2, 3, 4]) == 0


@pytest.mark.parametrize("kind", ["sliding_window", "mamba", "chunked_local_attention", "unknown", "one of tomorrow"])
def test_groups_that_forget_the_beginning_are_passed_over(kind):
    fed = Fed(stored([1], [1, 2, 3, 4], group_idx=0, kv_cache_spec_kind=kind))
    fed.take(stored([1], [1, 2, 3, 4], group_idx=1, kv_cache_spec_kind="mla_attention"), removed([1], group_idx=0))
    assert fed.cached([1, 2, 3, 4]) == 4
    assert fed.index.refused == fed.feed.strange == 0
    fed.take(removed([1], group_idx=1))
    assert fed.cached([1, 2, 3, 4]) == 0


def test_of_several_whole_groups_one_is_counted():
    fed = Fed(stored([1], [1, 2, 3, 4], group_idx=0), stored([1], [1, 2, 3, 4], group_idx=1), removed([1], group_idx=0))
    assert fed.cached([1, 2, 3, 4]) == 0


def test_fields_of_other_versions_are_optional_or_passed_over():
    plain = {
        "type": "BlockStored",
        "block_hashes": [1],
        "parent_block_hash": None,
        "token_ids": [1, 2],
        "block_size": 2,
    }
    fed = Fed(plain, {**plain, "block_hashes": [2], "parent_block_hash": 1, "of_tomorrow": {"a": 1}})
    assert fed.cached([1, 2, 1, 2]) == 4


def test_adapter_and_salt_come_from_the_event():
    fed = Fed(stored([1], [1, 2, 3, 4], lora_name="l", extra_keys=[["l", "s"]]))
    assert fed.cached([1, 2, 3, 4], lora="l", salt="s") == 4
    assert fed.cached([1, 2, 3, 4], lora="l") == fed.cached([1, 2, 3, 4], salt="s") == fed.cached([1, 2, 3, 4]) == 0


def test_one_event_that_cannot_be_used_does_not_lose_the_others():
    strange = [
        {"type": "OfTomorrow", "x": 1},
        stored([1.5], [1]),
        stored([1], ["a"]),
        stored([7], [-1, 0, 0, 0]),
        stored([7], [1 << 40, 0, 0, 0]),
        stored([7], [1, 2, 3, 4], extra_keys=[[{"a": []}]]),
        stored([7], [1, 2, 3, 4], extra_keys=[[[[1], 2]]]),
        ["BlockStored", [1]],
        None,
    ]
    fed = Fed(*strange, stored([1], [1, 2, 3, 4]), cleared(), stored([2], [5, 6, 7, 8]))
    assert fed.feed.strange == len(strange)
    assert fed.cached([1, 2, 3, 4]) == 0
    assert fed.cached([5, 6, 7, 8]) == 4
    assert len(fed.index) == fed.index.blocks(P0) == 1


def test_an_event_without_blocks_is_nothing():
    fed = Fed(stored([], [1, 2, 3, 4]), removed([]))
    assert (len(fed.index), fed.index.refused, fed.feed.strange) == (0, 0, 0)


def test_sequence_numbers():
    assert sequence_of((5).to_bytes(8, "big")) == 5
    assert sequence_of(END_OF_REPLAY) is None
    assert sequence_of(b"") is None


LEAF = st.sampled_from([None, True, -1, 0, 3, 2**63, 1.5, "", "x", b"", b"y"])
JSON = LEAF | st.lists(LEAF, max_size=3) | st.lists(st.lists(LEAF, max_size=2), max_size=2)
EVENTS = st.fixed_dictionaries(
    {"type": st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared"])},
    optional={
        "block_hashes": st.lists(st.integers(0, 9), max_size=3) | JSON,
        "parent_block_hash": st.integers(0, 9) | JSON,
        "token_ids": st.lists(st.integers(0, 99), max_size=12) | JSON,
        "block_size": st.integers(0, 5) | JSON,
        "lora_name": JSON,
        "extra_keys": st.lists(JSON, max_size=3) | JSON,
        "group_idx": st.none() | JSON,
    },
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS | JSON, max_size=4), st.binary(max_size=30))
def test_nothing_that_comes_raises(events, noise):
    fed = Fed()
    for payload in (msgspec.msgpack.encode([0.0, events]), msgspec.msgpack.encode(events), noise):
        fed.feed.take(BatchDecoder().decode(payload))
    assert fed.index.blocks(P0) == len(fed.index)
    fed.index.cached(pack(range(40)))
