"""Prompts share text where the trace shares blocks, and nowhere else."""

from pdcluster.replay.prompts import Prompts
from pdcluster.replay.trace import Arrival


def arrival(*blocks, tokens):
    return Arrival(0.0, tokens, 1, blocks)


def shared(one, other):
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_a_prompt_has_four_characters_for_each_token_all_of_them_words():
    text = Prompts().text(arrival(5, 6, 7, tokens=1100))
    assert len(text) == 4400
    assert {len(word) for word in text.split()} == {3}
    assert len(text.split()) == 1100


def test_equal_blocks_are_equal_text_and_the_first_that_differs_differs_at_once():
    prompts = Prompts(3)
    one, other = (prompts.text(arrival(1, 2, last, tokens=1536)) for last in (3, 4))
    assert one == Prompts(3).text(arrival(1, 2, 3, tokens=1536))
    assert 1024 * 4 <= shared(one, other) < 1040 * 4  # well within an engine's block of sixteen tokens


def test_another_seed_gives_other_words_and_the_same_sharing():
    one, other = (Prompts(seed).text(arrival(1, 1, tokens=1024)) for seed in (1, 2))
    assert shared(one, other) < 64
    assert one[:2048] == one[2048:]


def test_blocks_may_be_smaller_for_engines_with_a_short_context():
    text = Prompts(0, 16).text(arrival(9, 9, 8, tokens=40))
    assert (text[:64], len(text)) == (text[64:128], 160)
    assert text[128:160] not in text[:128]


def test_thousands_of_blocks_have_beginnings_of_their_own():
    prompts = Prompts()
    assert len({prompts.text(arrival(block, tokens=16)) for block in range(5000)}) == 5000
