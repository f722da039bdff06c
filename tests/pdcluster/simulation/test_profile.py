"""Engine profiles: what they compute, and that a file keeps them."""

from dataclasses import replace

import pytest

from pdcluster.errors import UserError
from pdcluster.simulation.profile import EngineProfile, Fit, load_profile, save_profile

PLAIN = EngineProfile()


def test_the_defaults_are_those_of_the_reference_stand_in():
    assert PLAIN.prefill_s(40_000, 0) == 1.0
    assert PLAIN.decode_s(48, 1e6) == pytest.approx(0.020)
    assert PLAIN.transfer_s(1000) == pytest.approx(0.005)
    assert (PLAIN.max_num_seqs, PLAIN.cache_blocks, PLAIN.block_tokens) == (48, 1500, 512)


def test_many_steps_cost_what_they_cost_one_by_one():
    profile = replace(PLAIN, decode_token_s=1e-6)
    single = sum(profile.decode_s(3, 100 + 3 * index) for index in range(10))
    assert profile.decode_s(3, 100, 10) == pytest.approx(single)
    assert profile.decode_s(0, 0, 10) == 0.0


def test_chunks_of_a_prompt_cost_what_the_whole_costs():
    profile = replace(PLAIN, prefill_pair_s=1e-9)
    parts = sum(profile.prefill_s(1000, 1000 * index) for index in range(4))
    assert parts == pytest.approx(profile.prefill_s(4000, 0))


def test_a_file_keeps_everything(tmp_path):
    profile = replace(PLAIN, chunk_tokens=2048, kv_blocks=99, fit=Fit("http://x", 0.01, 0.02, 0.1, 12))
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


def test_what_a_file_leaves_out_has_its_default(tmp_path):
    (tmp_path / "p.json").write_text('{"max_num_seqs": 7}')
    assert load_profile(tmp_path / "p.json") == replace(PLAIN, max_num_seqs=7)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not JSON"),
        ("[]", "not an engine profile"),
        ('{"format": 2}', "not an engine profile of format 1"),
        ('{"speed": 1}', "speed: there is no such key; there are block_tokens"),
        ('{"max_num_seqs": 0}', "max_num_seqs: must be a whole number, 1 or more, is 0"),
        ('{"max_num_seqs": null}', "max_num_seqs: must be a number"),
        ('{"block_tokens": 1.5}', "block_tokens: must be a whole number"),
        ('{"decode_base_s": -1}', "decode_base_s: must be 0 or more"),
        ('{"lease_s": 0}', "lease_s: must be more than 0"),
        ('{"prefill_tokens_per_s": true}', "prefill_tokens_per_s: must be a number"),
        ('{"pulls_cached": 1}', "pulls_cached: must be true or false"),
        ('{"fit": {"x": 1}}', "fit: must be null or an object with engine"),
    ],
)
def test_a_file_at_fault_is_refused_with_its_key(tmp_path, text, told):
    path = tmp_path / "p.json"
    path.write_text(text)
    with pytest.raises(UserError, match=r"p\.json: ") as caught:
        load_profile(path)
    assert told in str(caught.value)


def test_files_that_cannot_be_read_or_written_are_told(tmp_path):
    with pytest.raises(UserError, match="cannot read"):
        load_profile(tmp_path / "none.json")
    with pytest.raises(UserError, match="cannot write"):
        save_profile(PLAIN, tmp_path / "none" / "p.json")


def test_blocks_of_another_size_are_the_same_memory():
    fine = replace(PLAIN, block_tokens=16, kv_blocks=6400, cache_blocks=None)
    coarse = fine.with_blocks_of(512)
    assert (coarse.block_tokens, coarse.kv_blocks, coarse.cache_blocks) == (512, 200, None)
