import json

import jsonschema
import pytest
import yaml

from pdcluster.errors import SpecError, UserError
from pdcluster.spec_loading import Flag, json_schema, load_spec, parse_set_flags, with_flags


def load_text(tmp_path, text, *assignments):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return load_spec(path, parse_set_flags(assignments))


def test_defaults_alone_are_a_valid_spec():
    loaded = load_spec()
    assert loaded.spec.model == "smollm2"
    assert loaded.origin("model") == "default"


def test_flags_win_over_the_file_and_the_file_over_defaults(tmp_path):
    loaded = load_text(
        tmp_path, "model: tiny\npools: {decode: {replicas: 3, max_num_seqs: 8}}", "pools.decode.replicas=4"
    )
    assert (loaded.spec.model, loaded.spec.pools.decode.replicas, loaded.spec.pools.decode.max_num_seqs) == (
        "tiny",
        4,
        8,
    )
    assert loaded.origin("pools.decode.replicas") == "--set pools.decode.replicas"
    assert loaded.origin("pools.decode.max_num_seqs").endswith("cluster.yaml")
    assert loaded.origin("pools.prefill.replicas") == "default"


def test_every_error_is_reported_at_once_with_its_key_path(tmp_path):
    text = "modle: tiny\npools: {prefill: {replicas: 0}, decode: {tensor_paralel_size: 2}}\nproxy: {port: 99999}"
    with pytest.raises(SpecError) as caught:
        load_text(tmp_path, text)
    problems = {problem.where.split(" ")[0]: str(problem) for problem in caught.value.problems}
    assert problems.keys() == {"modle", "pools.prefill.replicas", "pools.decode.tensor_paralel_size", "proxy.port"}
    assert "did you mean model?" in problems["modle"]
    assert "did you mean tensor_parallel_size?" in problems["pools.decode.tensor_paralel_size"]
    assert "greater than or equal to 1" in problems["pools.prefill.replicas"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [("131072", 131072), ('"128k"', 128_000), ('"128K"', 131_072), ('"1M"', 1_048_576), ('"1.5m"', 1_500_000)],
)
def test_lengths_take_vllms_suffixes(tmp_path, text, expected):
    assert (
        load_text(tmp_path, f"pools: {{decode: {{max_model_len: {text}}}}}").spec.pools.decode.max_model_len == expected
    )


@pytest.mark.parametrize("text", ["many", '"-1k"', '"1T"', "0"])
def test_a_senseless_length_is_refused(tmp_path, text):
    with pytest.raises(SpecError, match=r"pools\.decode\.max_model_len"):
        load_text(tmp_path, f"pools: {{decode: {{max_model_len: {text}}}}}")


def test_unreadable_yaml_names_file_line_and_column(tmp_path):
    with pytest.raises(UserError, match=r"cluster\.yaml:2:\d+: not valid YAML"):
        load_text(tmp_path, "model: tiny\n  pools: [")


@pytest.mark.parametrize("text", ["- a list", "just text", "1: number"])
def test_a_document_that_is_no_mapping_is_refused(tmp_path, text):
    with pytest.raises(UserError, match="a cluster spec is a mapping"):
        load_text(tmp_path, text)


def test_an_empty_file_means_the_defaults(tmp_path):
    assert load_text(tmp_path, "").spec == load_spec().spec


def test_a_missing_file_is_one_clear_line(tmp_path):
    with pytest.raises(UserError, match="No such file"):
        load_spec(tmp_path / "none.yaml")


def test_a_file_that_is_no_text_is_refused(tmp_path):
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        load_spec(path)


def test_speculative_keys_of_vllm_pass_through(tmp_path):
    text = "pools: {decode: {speculative: {method: ngram, num_speculative_tokens: 3, prompt_lookup_max: 4}}}"
    config = load_text(tmp_path, text).spec.pools.decode.speculative.config()
    assert config == {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}


def test_speculation_without_method_or_model_is_refused(tmp_path):
    with pytest.raises(SpecError, match="set method"):
        load_text(tmp_path, "pools: {decode: {speculative: {num_speculative_tokens: 3}}}")


def test_environment_values_may_be_yaml_numbers_and_booleans(tmp_path):
    env = load_text(tmp_path, "pools: {decode: {env: {A: 1, B: true, C: false, D: text}}}").spec.pools.decode.env
    assert env == {"A": "1", "B": "1", "C": "0", "D": "text"}


def test_set_without_a_value_is_refused():
    with pytest.raises(SpecError, match="is not KEY=VALUE"):
        parse_set_flags(["pools.decode.replicas"])


def test_set_through_a_value_is_refused():
    with pytest.raises(SpecError, match="holds a value, not keys"):
        load_spec(None, [Flag("model", "tiny", "--model"), Flag("model.size", 1, "--set model.size")])


def test_values_can_be_set_on_top_of_a_valid_spec():
    loaded = with_flags(
        load_spec(None, [Flag("model", "tiny", "--model")]), [Flag("pools.decode.replicas", 2, "--fit-memory")]
    )
    assert (loaded.spec.model, loaded.spec.pools.decode.replicas) == ("tiny", 2)
    assert loaded.origin("pools.decode.replicas") == "--fit-memory"
    assert loaded.origin("model") == "--model"


def test_the_schema_accepts_what_the_spec_accepts_and_refuses_unknown_keys():
    schema = json.loads(json_schema())
    good = yaml.safe_load("model: tiny\npools: {decode: {replicas: 2, max_model_len: 128k, env: {A: x}}}")
    jsonschema.validate(good, schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"modle": "tiny"}, schema)


def test_a_key_that_stands_twice_is_refused_with_its_line(tmp_path):
    with pytest.raises(UserError, match=r"cluster\.yaml:2:1: not valid YAML: the key model stands twice"):
        load_text(tmp_path, "model: tiny\nmodel: smollm2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("pools: null", "pools .*must be a mapping of keys"),
        ("proxy: []", "proxy .*must be a mapping of keys"),
        ("pools: {decode: {extra_args: --seed}}", "must be a list"),
        ("pools: {decode: {replicas: 99999999999}}", "less than or equal to 4096"),
        ("pools: {decode: {replicas: many}}", "must be a whole number"),
        ('model: ""', "at least 1 character"),
        ("name: ../etc", "match pattern"),
    ],
)
def test_odd_values_are_refused_in_words_of_yaml(tmp_path, text, words):
    with pytest.raises(SpecError, match=words):
        load_text(tmp_path, text)
