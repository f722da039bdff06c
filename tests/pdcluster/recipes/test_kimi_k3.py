"""The shipped recipe: the facts of its newer source, and what it allows and forbids."""

import pytest

from pdcluster.errors import UserError
from pdcluster.recipes.checks import check_offer
from pdcluster.recipes.deployment import deploy
from pdcluster.recipes.golden import read_cases, verify
from pdcluster.recipes.library import Library
from pdcluster.recipes.offers import hardware_for, strategies_on
from pdcluster.recipes.request import Request, complete
from pdcluster.recipes.tokens import value_of

K3 = "moonshotai/Kimi-K3"
STRATEGIES = (
    "single_node_tp", "multi_node_tp", "multi_node_tep", "multi_node_tp_pp", "multi_node_tp_dp", "multi_node_dep", "pd_cluster",
)  # fmt: skip
HARDWARE = ["h100", "h200", "b200", "b300", "gb200", "gb300", "mi300x", "mi325x", "mi355x", "ascend_910c"]


@pytest.fixture(scope="module")
def library():
    return Library()


def deployed(library, **wanted):
    return deploy(library, complete(library, Request(K3, **wanted)).choice)


def refusals(library, **wanted):
    return {finding.rule: str(finding) for finding in deployed(library, **wanted).of_kind("refusal")}


@pytest.mark.parametrize(
    ("variant", "model", "precision", "gigabytes"),
    [
        ("default", "moonshotai/Kimi-K3", "mxfp4", 1680),
        ("nvfp4", "RedHatAI/Kimi-K3-NVFP4", "nvfp4", 1650),
        ("ascend_w4a8", "Eco-Tech/Kimi-K3-w4a8", "int4", 1711),
        ("fp8", "RedHatAI/Kimi-K3-FP8-BLOCK", "fp8", 3360),
    ],
)
def test_every_variant_declares_its_checkpoint_precision_and_minimum(library, variant, model, precision, gigabytes):
    recipe = library.recipe(K3)
    assert deployed(library, variant=variant).commands[0].model == model
    assert recipe.get("variants", variant, "precision") == precision
    assert recipe.get("variants", variant, "vram_minimum_gb") == gigabytes


def test_versions_hardware_and_strategies_are_those_of_the_newer_source(library):
    recipe = library.recipe(K3)
    assert recipe.get("model", "min_vllm_version") == "0.29.0"
    assert sorted(library.profiles()) == sorted(HARDWARE)
    verified = {"h200", "b200", "b300", "gb200", "gb300", "mi355x", "ascend_910c"}
    assert {name for name, status in recipe.get("meta", "hardware").items() if status == "verified"} == verified
    assert set(library.strategies()) == set(STRATEGIES)


def test_the_default_selection_is_the_newer_sources(library):
    assert complete(library, Request(K3)).choice.features == (
        "spec_decoding",
        "text_only",
        "decode_context_parallelism",
    )


def test_every_leaf_of_the_shipped_data_names_a_source_that_is_described(library):
    def leaves(node, path=()):
        if isinstance(node, dict):
            for key, value in node.items():
                yield from leaves(value, (*path, key))
        else:
            yield path

    for document in (library.recipe(K3), library.taxonomy()):
        for path in leaves({key: value for key, value in document.data.items() if key not in ("sources", "facts")}):
            assert document.source(path), path
        assert set(document.get("facts").values()) <= set(document.get("sources"))


def test_the_shipped_recipe_resolves_as_the_golden_cases_say_where_both_sources_agree(library, golden):
    """The golden cases name their features, and their arguments are the older source's, which the newer did not change."""
    cases = read_cases(golden / "handed.jsonl.gz")
    results = {case["id"]: case for case in cases}
    own = [
        {
            **{key: value for key, value in case.items() if key != "same_as"},
            "result": results[case.get("same_as", case["id"])]["result"],
        }
        for case in cases
        if case["model"] == K3
    ]
    verdict = verify(own, library)
    assert len(own) > 400
    assert verdict.unexplained == []


def test_every_combination_that_the_recipe_allows_resolves(library):
    recipe, count = library.recipe(K3), 0
    for variant in recipe.get("variants"):
        for profile in hardware_for(recipe, variant, library.profiles().values()):
            for strategy in strategies_on(recipe, profile):
                found = deployed(library, variant=variant, hardware=profile.id, strategy=strategy)
                assert not found.of_kind("refusal"), (variant, profile.id, strategy, found.of_kind("refusal"))
                assert found.commands
                count += 1
    assert count > 120


def test_no_combination_is_silent_about_why_it_is_refused(library):
    for variant in library.recipe(K3).get("variants"):
        for hardware in library.profiles():
            for strategy in STRATEGIES:
                found = deployed(library, variant=variant, hardware=hardware, strategy=strategy)
                refused = found.of_kind("refusal")
                assert bool(refused) == bool(list(check_offer(found.selection)))
                assert all(item.what and item.fix for item in refused)


@pytest.mark.parametrize(
    ("wanted", "rule", "words"),
    [
        ({"variant": "nvfp4", "hardware": "h200", "strategy": "single_node_tp"}, "hardware-not-offered",
         ["precision nvfp4 needs generation blackwell", "nvfp4 on b200, gb200, b300, gb300", "variant default or fp8 on h200"]),
        ({"variant": "ascend_w4a8", "hardware": "b300", "strategy": "single_node_tp"}, "hardware-not-offered",
         ["supports ascend_910c only", "ascend_w4a8 on ascend_910c"]),
        ({"hardware": "ascend_910c", "strategy": "single_node_tp"}, "hardware-not-offered", ["variant ascend_w4a8 or fp8 on ascend_910c"]),
        ({"hardware": "b300", "strategy": "multi_node_tp_pp", "features": ("spec_decoding",)}, "feature-not-possible",
         ["spec_decoding adds nothing with multi_node_tp_pp", "leave the feature out"]),
        ({"hardware": "gb300", "strategy": "single_node_tp"}, "strategy-not-offered", ["needs 8 GPUs", "choose multi_node_tp"]),
        ({"hardware": "h100", "strategy": "multi_node_tp", "nodes": 2}, "below-floor", ["needs 32 GPUs, here are 16", "give 4 nodes"]),
        ({"hardware": "b300", "strategy": "multi_node_tp_dp"}, "strategy-not-offered", ["on h200, gb200, gb300 only"]),
        ({"hardware": "h200", "strategy": "multi_node_dep"}, "strategy-not-offered", ["unsupported on h200"]),
        ({"hardware": "b300", "strategy": "single_node_tp", "user_args": ("--decode-context-parallel-size=3",), "without": ("decode_context_parallelism",)},
         "dcp-divides-tp", ["does not divide TP 8"]),
        ({"hardware": "b300", "strategy": "single_node_tp", "user_args": ("--mm-encoder-tp-mode", "data")}, "text-only-with-encoder",
         ["leave out text_only"]),
        ({"hardware": "b300", "strategy": "pd_cluster", "decode_nodes": 1}, "below-floor", ["the decode pool (dep) needs 16 GPUs"]),
    ],
)  # fmt: skip
def test_what_the_recipe_forbids_is_refused_with_the_rule_and_what_to_choose_instead(library, wanted, rule, words):
    found = refusals(library, **wanted)
    assert rule in found, found
    for word in words:
        assert word in found[rule]


def test_where_no_source_says_how_many_devices_a_node_has_sizes_stay_variables_until_told(library):
    unknown = deployed(library, variant="ascend_w4a8", strategy="multi_node_tp")
    assert value_of(unknown.commands[1].units, "--tensor-parallel-size").value == "$((GPUS_PER_NODE*2))"
    assert "floor-unknown" in {finding.rule for finding in unknown.of_kind("warning")}
    told = deployed(library, variant="ascend_w4a8", strategy="multi_node_tp", gpus_per_node=16)
    assert value_of(told.commands[1].units, "--tensor-parallel-size").value == "32"
    few = refusals(library, variant="ascend_w4a8", strategy="single_node_tp", gpus_per_node=4)
    assert "below-floor" in few or "strategy-not-offered" in few


def test_a_pool_on_gb300_has_the_published_layout_on_every_node(library):
    found = deployed(library, variant="nvfp4", hardware="gb300", strategy="pd_cluster", features=("reasoning",))
    assert [command.name for command in found.commands] == [
        "prefill-node-1", "prefill-node-2", "decode-node-1", "decode-node-2", "decode-node-3", "decode-node-4",
    ]  # fmt: skip
    decode = found.commands[4]
    assert value_of(decode.units, "--data-parallel-start-rank").value == "8"
    assert value_of(decode.units, "--moe-backend").value == "deep_gemm_mega_moe"
    assert decode.env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$DECODE_NODE_3"
    assert "--headless" in found.commands[1].argv


def test_unknown_names_get_the_nearest_ones(library):
    for wanted, words in (
        ({"variant": "nvpf4"}, "did you mean nvfp4?"),
        ({"features": ("encoder_parallel",)}, "feature encoder_parallel: unknown"),
        ({"strategy": "pd_cluster", "hardware": "b300", "decode_parallelism": "ep"}, "did you mean"),
        ({"strategy": "pd_cluster", "hardware": "b300", "nodes": 2}, "--prefill-nodes"),
    ):
        with pytest.raises(UserError) as caught:
            deployed(library, **wanted)
        assert words in str(caught.value)
