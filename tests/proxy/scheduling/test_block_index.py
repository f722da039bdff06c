"""The exact index of KV blocks: what engines say, found again by the tokens of a prompt."""

import hashlib
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.scheduling.block_index import BlockIndex, Publisher, Stored, pack, short_hash

P0, P1 = Publisher(0), Publisher(1)
SIZE = 4


class Engine:
    """Keeps blocks as vLLM does: the oldest unused go first, equal ones twice where their requests ran at once."""

    def __init__(self, index, publisher, room=1000, seed="0", size=SIZE):
        self.index, self.publisher, self.room, self.seed, self.size = index, publisher, room, seed, size
        self.blocks = OrderedDict()  # block number -> hash, the next to go first
        self.numbers = 0

    def hashes(self, ids, lora=None, salt=None):
        found, parent = [], self.seed
        for start in range(0, len(ids) - self.size + 1, self.size):
            extra = (lora, salt if start == 0 else None)
            parent = hashlib.sha256(repr((parent, ids[start : start + self.size], extra)).encode()).digest()
            found.append(parent)
        return found

    def hit(self, ids, lora=None, salt=None):
        held, count = set(self.blocks.values()), 0
        for block_hash in self.hashes(ids, lora, salt)[: (len(ids) - 1) // self.size]:
            if block_hash not in held:
                break
            count += 1
        return count * self.size

    def run(self, ids, lora=None, salt=None, copies=1):
        """Serve one prompt, or the same at once several times."""
        hashes = self.hashes(ids, lora, salt)
        hits = self.hit(ids, lora, salt) // self.size
        used = set(hashes[:hits])
        for number in [number for number, block_hash in self.blocks.items() if block_hash in used]:
            self.blocks.move_to_end(number)
        for _ in range(copies):
            if hits < len(hashes):
                self._store(ids, hashes, hits, lora, salt)
        while len(self.blocks) > self.room:
            self.index.removed(self.publisher, [short_hash(self.blocks.popitem(last=False)[1])])

    def _store(self, ids, hashes, first, lora, salt):
        for block_hash in reversed(hashes[first:]):
            self.blocks[self.numbers] = block_hash
            self.numbers += 1
        extra = [[item for item in (lora, salt if at == 0 else None) if item] for at in range(first, len(hashes))]
        self.index.stored(
            self.publisher,
            Stored(
                [short_hash(item) for item in hashes[first:]],
                short_hash(hashes[first - 1]) if first else None,
                pack(ids[first * self.size : len(hashes) * self.size]),
                self.size,
                lora,
                [item or None for item in extra] if any(extra) else None,
            ),
        )


def prompt(length, first=0):
    return list(range(first, first + length))


def test_only_full_blocks_count_and_never_the_last_token():
    index = BlockIndex()
    Engine(index, P0).run(prompt(18))
    assert index.cached(pack(prompt(18))) == {P0: 16}
    assert index.cached(pack(prompt(17))) == {P0: 16}
    assert index.cached(pack(prompt(16))) == {P0: 12}
    assert index.cached(pack(prompt(4))) == {}
    assert index.cached(pack([])) == {}


def test_engines_with_other_seeds_and_block_sizes_are_compared_by_tokens():
    index = BlockIndex()
    Engine(index, P0, seed="a").run(prompt(40))
    Engine(index, P1, seed="b", size=16).run(prompt(40))
    assert index.cached(pack(prompt(100))) == {P0: 40, P1: 32}


def test_what_follows_a_known_block_is_found_behind_it():
    index = BlockIndex()
    engine = Engine(index, P0)
    engine.run(prompt(16))
    engine.run(prompt(16) + prompt(16, 500))
    assert index.cached(pack([*prompt(16), *prompt(16, 500), 7])) == {P0: 32}
    assert len(index) == index.blocks(P0) == 8


def test_ranks_of_one_endpoint_are_told_apart_and_forgotten_together():
    index = BlockIndex()
    ranks = [Publisher(0, 0), Publisher(0, 1)]
    for count, rank in enumerate(ranks, 1):
        Engine(index, rank).run(prompt(8 * count))
    Engine(index, P1).run(prompt(20))
    assert index.cached(pack(prompt(30))) == {ranks[0]: 8, ranks[1]: 16, P1: 20}
    index.forget(0)
    assert index.cached(pack(prompt(30))) == {P1: 20}


@pytest.mark.parametrize("key", [{"lora": "a"}, {"salt": "s"}, {"lora": "a", "salt": "s"}, {"lora": "a", "salt": "a"}])
def test_adapters_and_salts_never_share_blocks(key):
    index = BlockIndex()
    Engine(index, P0).run(prompt(16), **key)
    ids = pack(prompt(17))
    assert index.cached(ids, **key) == {P0: 16}
    for other in ({}, {"lora": "b"}, {"salt": "t"}, {"lora": "s"}, {"salt": key.get("lora")}):
        if other != key and {**dict.fromkeys(key), **other} != key:
            assert index.cached(ids, **other) == {}, other


def test_a_block_with_an_image_is_not_found_by_its_tokens_alone():
    index = BlockIndex()
    ids = prompt(12)
    index.stored(P0, Stored([1, 2, 3], None, pack(ids), SIZE, None, [None, [["image-id", 1]], None]))
    assert index.cached(pack([*ids, 0])) == {P0: 4}


def test_equal_blocks_stored_twice_are_removed_twice():
    index = BlockIndex()
    stored = Stored([11, 12], None, pack(prompt(8)), SIZE)
    index.stored(P0, stored)
    index.stored(P0, stored)
    index.removed(P0, [12, 11])
    assert index.cached(pack(prompt(9))) == {P0: 8}
    index.removed(P0, [12])
    assert index.cached(pack(prompt(9))) == {P0: 4}
    index.removed(P0, [11, 11])
    assert index.cached(pack(prompt(9))) == {}
    assert len(index) == 0


def test_a_gap_in_the_middle_ends_the_match_until_it_is_filled():
    index = BlockIndex()
    index.stored(P0, Stored([1, 2, 3], None, pack(prompt(12)), SIZE))
    index.removed(P0, [2])
    assert index.cached(pack(prompt(13))) == {P0: 4}
    index.stored(P0, Stored([2], 1, pack(prompt(4, 4)), SIZE))
    assert index.cached(pack(prompt(13))) == {P0: 12}


def test_cleared_blocks_are_gone_at_once_and_the_publisher_may_begin_anew():
    index = BlockIndex()
    engine = Engine(index, P0)
    engine.run(prompt(40))
    index.cleared(P0)
    index.cleared(P0)
    assert index.cached(pack(prompt(41))) == {}
    Engine(index, P0, seed="after a restart", size=8).run(prompt(16))
    assert index.cached(pack(prompt(41))) == {P0: 16}
    assert len(index) == index.blocks(P0) == 2


def test_blocks_behind_an_unknown_one_are_counted_not_guessed():
    index = BlockIndex()
    index.stored(P0, Stored([5], 4, pack(prompt(4)), SIZE))
    assert (index.orphans, len(index)) == (1, 0)
    assert index.cached(pack(prompt(9))) == {}
    index.removed(P0, [5, 6])
    index.removed(P1, [5])


@pytest.mark.parametrize(
    "event",
    [
        Stored([1], None, pack(prompt(3)), SIZE),
        Stored([1, 2], None, pack(prompt(4)), SIZE),
        Stored([1], None, b"", 0),
        Stored([1], None, pack(prompt(8)), 8),
    ],
)
def test_blocks_that_make_no_sense_are_counted_not_taken(event):
    index = BlockIndex()
    index.stored(P0, Stored([9], None, pack(prompt(4, 50)), SIZE))
    index.stored(P0, event)
    assert index.refused == len(event.hashes)
    assert len(index) == 1


def test_memory_is_bounded_and_the_oldest_blocks_of_the_fullest_go():
    index = BlockIndex(blocks=3000)
    Engine(index, P1).run(prompt(400))
    engine = Engine(index, P0, room=10_000)
    for turn in range(100):
        engine.run([turn, *prompt(399, 1000)])
        assert len(index) <= 3000
    assert index.cached(pack(prompt(401)))[P1] == 400
    assert index.cached(pack([99, *prompt(399, 1000), 0])) == {P0: 400}
    assert index.cached(pack([0, *prompt(399, 1000), 0])) == {}


def test_what_was_cleared_makes_room_first():
    index = BlockIndex(blocks=200)
    Engine(index, P0).run(prompt(400))
    Engine(index, P1).run(prompt(400))
    index.cleared(P0)
    Engine(index, Publisher(2)).run(prompt(400))
    assert index.cached(pack(prompt(401))) == {P1: 400, Publisher(2): 400}


def test_hashes_of_either_kind_are_shortened():
    assert short_hash(b"\x01" * 24 + b"\x00" * 7 + b"\x02") == 2
    assert short_hash((1 << 64) + 5) == 5
    with pytest.raises((TypeError, OverflowError)):
        pack([-1])


RUNS = st.lists(
    st.tuples(
        st.integers(0, 2),  # endpoint
        st.lists(st.integers(0, 1), min_size=1, max_size=6),  # which blocks the prompt is made of
        st.integers(0, 3),  # tokens beyond
        st.sampled_from([None, "lora"]),
        st.sampled_from([None, "salt"]),
        st.integers(1, 2),  # at once
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(RUNS)
def test_the_prediction_is_what_the_engine_finds(runs):
    index = BlockIndex()
    engines = [Engine(index, Publisher(number), room=9, seed=str(number)) for number in range(3)]
    for endpoint, blocks, more, lora, salt, copies in runs:
        ids = [token for block in blocks for token in prompt(SIZE, 100 * block)] + prompt(more, 900)
        found = index.cached(pack(ids), lora, salt)
        for engine in engines:
            assert found.get(engine.publisher, 0) == engine.hit(ids, lora, salt)
        engines[endpoint].run(ids, lora, salt, copies)
    assert len(index) == sum(len(set(engine.blocks.values())) for engine in engines)
