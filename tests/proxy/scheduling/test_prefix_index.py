"""The approximate prefix index: who was sent which beginnings, within bounded memory."""

from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.scheduling.prefix_index import Chain, PrefixIndex, chain, covered


def common(one: Chain, other: Chain) -> int:
    count = 0
    for a, b in zip(one.keys, other.keys, strict=False):
        if a != b:
            break
        count += 1
    return count


def text(length: int, mark: str = "a") -> str:
    return "".join(chr(ord("a") + (index * 7 + index // 26) % 26) for index in range(length - 1)) + mark


def test_prompts_share_the_keys_of_their_common_chunks():
    start = text(10_000)
    one, other = chain(start + "x" * 5000), chain(start + "y" * 5000)
    shared = covered(common(one, other))
    assert 10_000 - 2048 < shared <= 10_000
    assert one.keys[-1] != other.keys[-1]


def test_a_key_stands_for_everything_before_it():
    one, other = chain("x" + text(4999)), chain("y" + text(4999))
    assert not set(one.keys) & set(other.keys)


def test_a_longer_prompt_begins_with_the_keys_of_the_shorter():
    assert chain(text(9000, "a") + "more" * 999).keys[:9] == chain(text(9000, "a")).keys[:9]
    assert common(chain("m" * 700_000), chain("m" * 900_000)) == len(chain("m" * 700_000).keys)


def test_the_salt_keeps_prompts_apart():
    assert common(chain("x" * 5000, "lora-a"), chain("x" * 5000, "lora-b")) == 0
    assert chain("x" * 5000, "lora-a") == chain("x" * 5000, "lora-a")


def test_less_than_a_chunk_has_no_keys_but_a_size():
    assert chain("x" * 511) == Chain((), 511)
    assert len(chain(b"x" * 512).keys) == 1


@pytest.mark.parametrize(
    ("length", "keys"), [(4096, 8), (6143, 8), (6144, 9), (65_536, 38), (524_288, 94), (5_000_000, 162)]
)
def test_chunks_grow_with_the_prompt(length, keys):
    assert len(chain(b"x" * length).keys) == keys
    assert length - 65_536 < covered(keys) <= length


def test_a_chunk_is_never_more_than_an_eighth_of_a_long_prompt():
    for count in range(9, 300):
        assert covered(count) - covered(count - 1) <= max(2048, covered(count - 1) // 7)


def test_the_longest_beginning_of_each_endpoint_is_found():
    index = PrefixIndex()
    start = text(4096)
    index.record(0, chain(start))
    index.record(1, chain(start + text(4096, "b")))
    index.record(7, chain("other" + start))
    assert index.matched(chain(start + text(4096, "b") + "x" * 9000)) == {0: 4096, 1: 8192}
    assert index.matched(chain("nobody" + start)) == {}
    assert index.matched(chain("")) == {}


def test_many_endpoints_are_told_apart():
    index = PrefixIndex()
    whole = chain(text(50_000))
    for endpoint in range(300):
        index.record(endpoint, Chain(whole.keys[: 1 + endpoint % 20], 0))
    assert index.matched(whole) == {endpoint: covered(1 + endpoint % 20) for endpoint in range(300)}


def test_a_forgotten_endpoint_matches_nothing_and_may_come_back():
    index = PrefixIndex()
    prompt = chain(text(4096))
    for endpoint in (0, 1):
        index.record(endpoint, prompt)
    index.forget(0)
    index.forget(0)
    assert index.matched(prompt) == {1: 4096}
    index.record(0, chain(text(1024)))
    index.record(2, prompt)
    assert index.matched(prompt) == {0: 512, 1: 4096, 2: 4096}


def test_forgetting_again_and_again_leaves_nothing_behind():
    index = PrefixIndex()
    for turn in range(200):
        index.record(0, chain(str(turn) + text(4096)))
        index.forget(0)
    for turn in range(20):
        index.record(1, chain(str(turn)))
    assert len(index) == 0
    assert len(index._table._owners) <= 4
    assert len(index._table) == 0


def test_what_was_used_last_is_kept():
    index = PrefixIndex()
    index.limit(0, 3 * 4096)
    prompts = [chain(name + text(4096)) for name in "abc"]
    for prompt in prompts:
        index.record(0, prompt)
    index.record(0, prompts[0])
    index.record(0, chain("d" + text(4096)))
    assert index.matched(prompts[1]) == {}
    assert index.matched(prompts[0]) == {0: 4096}
    assert index.matched(prompts[2]) == {0: 4096}


def test_the_end_of_a_prompt_is_forgotten_before_its_beginning():
    index = PrefixIndex()
    index.limit(0, 6000)
    long = chain(text(8192))
    index.record(0, long)
    assert index.matched(long) == {0: 4096}


def test_a_limit_outlives_a_restart():
    index = PrefixIndex()
    index.limit(0, 1024)
    index.forget(0)
    index.record(0, chain(text(4096)))
    assert index.matched(chain(text(4096))) == {0: 1024}


def test_one_busy_endpoint_cannot_push_out_the_others():
    index = PrefixIndex(entries=1000)
    quiet = [chain(f"{endpoint}" + text(4096)) for endpoint in range(1, 5)]
    for endpoint, prompt in enumerate(quiet, 1):
        index.record(endpoint, prompt)
    for turn in range(500):
        index.record(0, chain(f"{turn}busy" + text(4096)))
    assert len(index) <= 1000
    assert all(index.matched(prompt) == {endpoint: 4096} for endpoint, prompt in enumerate(quiet, 1))


def test_a_new_endpoint_gets_its_share_of_a_full_index():
    index = PrefixIndex(entries=1000)
    for turn in range(500):
        index.record(0, chain(f"{turn}busy" + text(4096)))
    for turn in range(30):
        index.record(1, chain(f"{turn}new" + text(4096)))
    assert index.matched(chain("0new" + text(4096))) == {1: 4096}
    assert len(index) <= 1000


PROMPTS = [chain("".join(parts)) for parts in ([a * 512, b * 512, c * 512] for a in "xy" for b in "xy" for c in "xy")]
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("record"), st.integers(0, 4), st.integers(0, 7)),
        st.tuples(st.just("forget"), st.integers(0, 4), st.just(0)),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_it_agrees_with_a_plain_list_of_recent_chunks(steps):
    index, plain = PrefixIndex(), {}
    for endpoint in range(5):
        index.limit(endpoint, 4 * 512)
    for verb, endpoint, number in steps:
        if verb == "forget":
            index.forget(endpoint)
            plain.pop(endpoint, None)
            continue
        index.record(endpoint, PROMPTS[number])
        held = plain.setdefault(endpoint, OrderedDict())
        for key in reversed(PROMPTS[number].keys):
            held.pop(key, None)
            held[key] = None
        while len(held) > 4:
            held.popitem(last=False)
    for prompt in PROMPTS:
        expected = {}
        for endpoint, held in plain.items():
            count = next((i for i, key in enumerate(prompt.keys) if key not in held), len(prompt.keys))
            if count:
                expected[endpoint] = covered(count)
        assert index.matched(prompt) == expected


@settings(max_examples=50, deadline=None)
@given(STEPS, st.integers(3, 12))
def test_it_never_holds_more_than_it_may(steps, most):
    index = PrefixIndex(entries=most)
    for verb, endpoint, number in steps:
        if verb == "forget":
            index.forget(endpoint)
        else:
            index.record(endpoint, PROMPTS[number])
        assert len(index) <= most
        assert len(index) == sum(len(held.chunks) for held in [*index._held.values(), *index._dropped])
        assert len(index) == sum(bits.bit_count() for bits in index._table._bits.values())
