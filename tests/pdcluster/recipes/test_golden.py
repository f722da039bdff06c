import gzip
import json

import pytest

from pdcluster.errors import UserError
from pdcluster.recipes.choice import select
from pdcluster.recipes.golden import choice_of, read_cases, verify
from pdcluster.recipes.resolve import resolve

# Where the published command cannot work: the case, and the rule by which we deviate from it.
DEVIATING = {
    "deepseek-ai/DeepSeek-V4-Flash|default|pd_cluster|h100|n1|f=default+all|pd=legacy1": "co-located-dep",
    "deepseek-ai/DeepSeek-V4-Flash|default|pd_cluster|dgx_spark_gb10|n1|f=default+all|pd=legacy1": "co-located-one-gpu",
    "thinkingmachines/Inkling|default|pd_cluster|b200|n1|f=default|pd=p2tpd2tpr1": "side-channel-host",
    "moonshotai/Kimi-K3|default|multi_node_tp_dp|h200|n2|f=default": "tp-dp-hybrid-lb",
    "thinkingmachines/Inkling|default|multi_node_tp_dp|b200|n2|f=default": "tp-dp-hybrid-lb",
    "MiniMaxAI/MiniMax-M2.5|default|single_node_dep|mi300x|n1|f=default+all": "sizes-against-gpus",
    "MiniMaxAI/MiniMax-M2.5|default|multi_node_tp|mi300x|n2|f=default+all": "sizes-against-gpus",
    "MiniMaxAI/MiniMax-M2.5|default|pd_cluster|mi300x|n1|f=default+all|pd=p2d4first": "sizes-against-gpus",
    "XiaomiMiMo/MiMo-V2-Flash|default|multi_node_dep|h100|n2|f=default+all": "sizes-against-gpus",
    "inclusionAI/Ling-2.6-1T|default|multi_node_dep|h100|n2|f=default+all+none": "sizes-against-gpus",
    "mistralai/Mistral-Large-3-675B-Instruct-2512|default|multi_node_dep|h100|n2|f=default": "sizes-against-gpus",
    "deepseek-ai/DeepSeek-V4-Flash|default|single_node_dep|dgx_station_gb300|n1|f=default+all": "sizes-against-gpus",
    "deepseek-ai/DeepSeek-V4-Flash|fp8|single_node_tp|h200|n1|f=only:spec_decoding|mode=spec_decoding:dspark": "mode-not-possible",
    "XiaomiMiMo/MiMo-V2.5-Pro|default|single_node_tp|h100|n1|f=default": "split-token",
    "moonshotai/Kimi-K2.5|default|pd_cluster|h100|n1|f=all|pd=p1d1": "text-only-with-encoder",
}
# Odd too, but they work, or the recipe means it: as published.
MATCHING = (
    "thinkingmachines/Inkling|default|multi_node_tp_dp|h200|n2|f=default",
    "moonshotai/Kimi-K3|default|pd_cluster|h200|n1|f=default|pd=p2d4first",
    "deepseek-ai/DeepSeek-V4-Flash|default|single_node_tp|dgx_spark_gb10|n1|f=default+all",
    "zai-org/GLM-5.1|default|single_node_tp|h100|n1|f=default",
    "deepseek-ai/DeepSeek-V3.1|default|single_node_tp|h100|n1|f=default+all",
)


@pytest.fixture(scope="module")
def cases(golden):
    return [*read_cases(golden / "handed.jsonl.gz"), *read_cases(golden / "handed-extra.jsonl.gz")]


def test_no_handed_case_differs_without_a_named_rule(cases, corpus):
    """A sixth of the cases, and every kind of deviation; all of them take ten seconds (`pdcluster recipe verify`)."""
    kept = [case for index, case in enumerate(cases) if index % 6 == 0 or case["id"] in DEVIATING]
    ids, needed = {case["id"] for case in kept}, {case.get("same_as") for case in kept}
    kept += [case for case in cases if case["id"] in needed - ids]
    verdict = verify(kept, corpus)
    print(
        json.dumps(
            {**verdict.to_json(), "deviations": {rule: found.count for rule, found in verdict.deviations.items()}}
        )
    )
    assert verdict.unexplained == []
    assert verdict.total == len(kept)
    assert verdict.exact + sum(found.count for found in verdict.deviations.values()) == verdict.total
    assert verdict.exact / verdict.total > 0.8


def test_every_offer_is_exact(golden, corpus):
    verdict = verify(read_cases(golden / "handed-offers.jsonl.gz"), corpus)
    assert (verdict.exact, verdict.unexplained) == (177, [])


def test_each_published_command_that_cannot_work_deviates_by_its_rule(cases, corpus):
    known = {case["id"]: case for case in cases}
    for name, rule in DEVIATING.items():
        case = {key: value for key, value in known[name].items() if key != "same_as"}
        case["result"] = known[known[name].get("same_as", name)]["result"]
        verdict = verify([case], corpus)
        assert {item: found.count for item, found in verdict.deviations.items()} == {rule: 1}, name


def test_what_is_odd_but_works_stays_as_published(cases, corpus):
    known = {case["id"]: case for case in cases}
    for name in MATCHING:
        case = {**known[name], "result": known[known[name].get("same_as", name)]["result"]}
        assert verify([case], corpus).exact == 1, name


def test_the_floor_is_refused_exactly_where_the_cases_say_that_it_is_not_reached(cases, corpus):
    for case in cases[::12]:
        rules = {finding.rule for finding in resolve(select(corpus, choice_of(case))).findings}
        assert ("below-floor" in rules) == bool(case.get("below_floor")), case["id"]


def test_a_difference_that_no_rule_explains_is_shown_where_it_is(shelf):
    shelf.write("")
    case = {"id": "a", "model": "acme/m", "variant": "default", "strategy": "single_node_tp", "hardware": "h200",
            "features": [], "nodes": 1, "pd_nodes": None,
            "result": {"single": {"argv": ["vllm"], "env": {"X": "1"}}}}  # fmt: skip
    verdict = verify([case, {**case, "id": "b", "variant": "none"}, {**case, "id": "c", "result": None}], shelf.library)
    assert verdict.exact == 0
    differences, unknown, empty = verdict.unexplained
    assert {item["where"] for item in differences["differences"]} == {"single.argv", "single.env.X"}
    assert "variant none: unknown" in unknown["error"]
    assert "neither a result" in empty["error"]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b'{"id": "a", "model": "m"}\nnonsense\n', "golden.jsonl:2: not JSON"),
        (b'{"id": 7}\n', "golden.jsonl:1: not a golden case"),
        (gzip.compress(b"{}", mtime=0)[:-9], "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_golden_file_that_is_none_is_refused(tmp_path, data, words):
    path = tmp_path / "golden.jsonl"
    path.write_bytes(data)
    with pytest.raises(UserError, match=words):
        read_cases(path)
