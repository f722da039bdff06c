"""KV blocks: sharing, eviction, limits, and what is told of them."""

import random

import pytest

from pdcluster.simulation.prefix_cache import BlockChanges, PrefixCache


def test_blocks_are_found_from_the_beginning_only():
    cache = PrefixCache(None, None)
    cache.acquire((1, 2, 3), 0)
    assert cache.hits((1, 2, 3, 4)) == 3
    assert cache.hits((1, 9, 3)) == 1
    assert cache.hits((9, 2, 3)) == 0
    assert cache.acquire((1, 9, 3), 0) == 1


def test_shared_blocks_take_memory_once_and_live_as_long_as_anybody_holds_them():
    cache = PrefixCache(4, None)
    assert cache.acquire((1, 2), 1) == 0
    assert cache.acquire((1, 2), 1) == 2
    assert (cache.used, cache.free) == (4, 0)
    assert cache.acquire((5,), 0) is None
    cache.release((1, 2), 1)
    assert cache.used == 3
    cache.release((1, 2), 1)
    assert (cache.used, cache.hits((1, 2))) == (0, 2)


def test_the_longest_unused_is_evicted_and_of_one_prompt_its_end():
    cache = PrefixCache(4, None)
    for blocks in ((1, 2), (3, 4)):
        cache.acquire(blocks, 0)
        cache.release(blocks, 0)
    cache.acquire((1, 2), 0)
    cache.release((1, 2), 0)
    cache.acquire((), 1)
    assert [cache.hits(blocks) for blocks in ((3, 4), (1, 2))] == [1, 2]
    cache.acquire((), 2)
    assert [cache.hits(blocks) for blocks in ((3, 4), (1, 2))] == [0, 1]


def test_no_more_prefixes_are_kept_than_allowed():
    cache = PrefixCache(None, 3)
    cache.acquire((1, 2, 3, 4), 0)
    assert cache.cached == 4  # they are in use
    cache.release((1, 2, 3, 4), 0)
    assert (cache.cached, cache.hits((1, 2, 3, 4))) == (3, 3)


def test_growing_takes_from_what_is_kept_and_fails_when_all_is_in_use():
    cache = PrefixCache(3, None)
    cache.acquire((1,), 0)
    cache.release((1,), 0)
    assert cache.grow(2)
    assert cache.hits((1,)) == 1
    assert cache.grow(1)
    assert cache.hits((1,)) == 0
    assert not cache.grow(1)
    assert cache.used == 3


def test_changes_tell_what_is_held_and_what_came_before():
    changes = BlockChanges()
    cache = PrefixCache(4, None, changes)
    cache.acquire((1, 2), 0)
    cache.release((1, 2), 0)
    cache.acquire((1, 2, 3, 4), 0)
    cache.release((1, 2, 3, 4), 0)
    cache.acquire((1, 7), 0)
    taken = changes.take()
    assert taken.stored == [(None, (1, 2)), (2, (3, 4)), (1, (7,))]
    assert taken.removed == [4]
    assert (changes.stored, changes.removed) == ([], [])
    cache.clear()
    assert sorted(changes.take().removed) == [2, 3]


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_limits_hold_and_changes_add_up(seed):
    rng, changes, held, told = random.Random(seed), BlockChanges(), [], set()
    cache = PrefixCache(60, 40, changes)
    for _ in range(2000):
        if held and rng.random() < 0.5:
            cache.release(*held.pop(rng.randrange(len(held))))
        else:
            family = rng.randrange(12)
            request = (tuple(100 * family + index for index in range(rng.randrange(1, 15))), rng.randrange(4))
            if cache.acquire(*request) is not None:
                held.append(request)
        taken = changes.take()
        told.update(block for _, blocks in taken.stored for block in blocks)
        told.difference_update(taken.removed)
        distinct = {block for blocks, _ in held for block in blocks}
        assert cache.used == len(distinct) + sum(plain for _, plain in held) <= 60
        assert distinct <= told
        assert len(told) == cache.cached <= max(40, len(distinct))
