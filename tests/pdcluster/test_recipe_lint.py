"""Recipes through a parser: a stand-in here, vLLM's own where it is installed."""

import os

import pytest

from pdcluster.argv_check import Parsed, run_parser, vllm_version
from pdcluster.errors import UserError
from pdcluster.flag_facts import is_older, parse_version
from pdcluster.recipe_lint import lint, lint_with
from pdcluster.recipes.library import Library
from pdcluster.recipes.substitution import substitute, variables_in
from pdcluster.recipes.survey import survey

KNOWN = ("--tensor-parallel-size", "--good", "--choice", "--attention-config", "--enable-expert-parallel")


class Refusing:
    """A parser that knows `KNOWN`; of --choice it wants "right", of --attention-config no unknown field."""

    def __init__(self):
        self.lists = []

    def __call__(self, arguments):
        self.lists = list(arguments.values())
        return Parsed({key: self.error(tokens) for key, tokens in arguments.items()}, KNOWN)

    def error(self, tokens):
        flags = [token for token in tokens[2:] if token.startswith("-")]
        unknown = [flag for flag in flags if flag.split(".")[0].split("=")[0].replace("_", "-") not in KNOWN]
        if unknown:
            return f"unrecognized arguments: {' '.join(unknown)}"
        if "wrong" in tokens:
            return "argument --choice: invalid choice: 'wrong'"
        if any("use_fp4_indexer_cache" in token for token in tokens):
            return "argument --attention-config/-ac: 1 validation error for AttentionConfig use_fp4_indexer_cache Unexpected"
        return "The template (some/long/path.jinja) doesn't exist" if "some/long/path.jinja" in tokens else ""


@pytest.fixture
def shelf(tmp_path):
    """A recipe directory with one strategy and one kind of hardware."""
    for folder in ("models/acme", "strategies"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "taxonomy.yaml").write_text(
        "hardware_profiles: {h200: {brand: NVIDIA, generation: hopper, gpu_count: 8, vram_gb: 1128}}\n"
    )
    (tmp_path / "strategies/single_node_tp.yaml").write_text(
        "{deploy_type: single_node, parallel_flag: --tensor-parallel-size}"
    )

    def write(arguments, more="", name="m"):
        (tmp_path / f"models/acme/{name}.yaml").write_text(
            f"model: {{model_id: m, min_vllm_version: 0.20.0, base_args: {arguments}}}\n"
            f"variants: {{default: {{}}}}\ncompatible_strategies: [single_node_tp]\n{more}"
        )
        return Library(tmp_path)

    return write


def checked(library, version="0.32.0"):
    return lint_with(library, version, Refusing(), lambda _: None)


@pytest.mark.parametrize(
    ("arguments", "cause", "hint"),
    [
        ("[--goood, '1']", "error in recipe", "did you mean --good?"),
        ("[--zzz]", "error in recipe", "has no flag like it"),
        ("[--disable-log-requests]", "older flag", "not logged by default"),
        ("[--attention_config.use_fp4_indexer_cache, 'True']", "older flag", "indexer_kv_dtype"),
        ("[--choice, wrong]", "error in recipe", "mend the value"),
        ("[--good, some/long/path.jinja]", "error in recipe", "mend the value"),
    ],
)
def test_a_refused_command_is_listed_with_where_it_stands_its_cause_and_a_hint(shelf, arguments, cause, hint):
    found = checked(shelf(arguments))
    (failure,) = found.failures
    assert failure.where == "models/acme/m.yaml:1: model.base_args"
    assert (failure.cause, failure.commands, found.accepted) == (cause, 1, 0)
    assert hint in failure.hint
    assert found.to_json()["failures"][0]["example"] == "acme/m|default|single_node_tp|h200|f=none|single"


def test_an_unknown_flag_of_a_recipe_for_a_later_vllm_is_a_newer_flag_and_its_floor_is_told(shelf):
    library = shelf("[--brand-new]")
    found = checked(library, version="0.19.1")
    assert found.failures[0].cause == "newer flag"
    assert "asks for vLLM 0.20.0, this is 0.19.1" in found.failures[0].hint
    assert found.floors == ("models/acme/m.yaml:1: model.min_vllm_version: needs vLLM 0.20.0, this is 0.19.1",)
    assert checked(library).floors == ()


def test_a_recipe_of_a_plugin_is_told_apart_from_an_error(shelf):
    found = checked(shelf("[--good]", "omni: {tasks: [{id: a, extra_args: [--stages, '2']}]}"))
    assert [failure.cause for failure in found.failures] == ["plugin flag"]
    assert "vllm-omni" in found.failures[0].hint


def test_commands_that_are_alike_are_parsed_once_and_failures_of_one_setting_are_one(shelf):
    library = shelf("[--good]", "features: {a: {args: [--bad]}, b: {args: [--good]}}\nopt_in_features: [a, b]")
    parser = Refusing()
    found = lint_with(library, "0.32.0", parser, lambda _: None)
    assert len(parser.lists) == 2
    assert [(failure.where, failure.commands) for failure in found.failures] == [
        ("models/acme/m.yaml:4: features.a.args", 1)
    ]


def test_names_that_nothing_answers_to_are_warned_about_by_path(shelf):
    library = shelf(
        "[]",
        "meta: {hardware: {h20: verified}}\nopt_in_features: [toolz]\nfeatures: {tools: {strategies: [single_node_pt]}}",
    )
    text = "\n".join(checked(library).warnings)
    assert "meta.hardware: hardware h20 is unknown and read by nothing (did you mean h200?)" in text
    assert "feature toolz" in text
    assert "did you mean single_node_tp?" in text


@pytest.mark.parametrize(
    ("version", "floor", "older"),
    [
        ("0.32.0", "0.29.0", False),
        ("0.29", "0.29.0", False),
        ("0.9.2", "0.10.0", True),
        ("0.29.0rc1", "0.29.0", False),
        ("0.29.0+cpu", "0.29.1", True),
        ("unknown", "0.29.0", True),
    ],
)
def test_versions_are_compared_by_number(version, floor, older):
    assert is_older(version, floor) is older
    assert parse_version("0.32.0.dev5") == (0, 32, 0)


def test_variables_are_filled_in_and_those_without_a_value_stay():
    values = {"HEAD_IP": "10.0.0.1", "GPUS_PER_NODE": "8", "PREFILL_NODE_1": "a", "PREFILL_NODE_12": "b"}
    assert substitute("tcp://$HEAD_IP:1", values) == "tcp://10.0.0.1:1"
    assert substitute("$((GPUS_PER_NODE*2/4))", values) == "4"
    assert substitute("$PREFILL_NODE_12 $OTHER $((OTHER*2))", values) == "b $OTHER $((OTHER*2))"
    assert variables_in("$A-$((B*2)) $5") == ["A", "B"]


@pytest.mark.skipif(vllm_version() is None, reason="vLLM is not installed")
def test_vllms_own_parser_names_its_flags_and_survives_a_refusal_of_any_kind():
    """One call, since vLLM takes 15 s to import: every command of the shipped recipe, and two that it refuses."""
    commands = [item for model in Library().models() for item in survey(Library(), model)]
    arguments = {str(number): ["--model", item.model, *item.arguments] for number, item in enumerate(commands)}
    arguments |= {"template": ["--model", "m", "--chat-template", "examples/no.jinja"], "flag": ["--no-such-flag"]}
    parsed = run_parser(arguments, os.environ)
    assert {key for key, error in parsed.errors.items() if error} == {"template", "flag"}
    assert "--decode-context-parallel-size" in parsed.flags


def test_without_vllm_lint_says_what_to_install(shelf, monkeypatch):
    monkeypatch.setattr("pdcluster.recipe_lint.vllm_version", lambda: None)
    with pytest.raises(UserError, match="pip install"):
        lint(shelf("[]"), {}, lambda _: None)
