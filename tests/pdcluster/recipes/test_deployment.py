import json

import pytest

from pdcluster.errors import UserError
from pdcluster.recipes.choice import Choice, PoolChoice
from pdcluster.recipes.deployment import deploy
from pdcluster.recipes.explaining import differences, explain_lines, shell_line, table_lines
from pdcluster.recipes.request import Request, complete
from pdcluster.recipes.summary import describe, summarise


def deployment(shelf, strategy="single_node_tp", hardware="h200", **choice):
    return deploy(shelf.library, Choice("acme/m", strategy, hardware, **choice))


def warnings(shelf, *arguments, **choice):
    return {finding.rule: str(finding) for finding in deployment(shelf, *arguments, **choice).of_kind("warning")}


SURPRISING = """
model: {model_id: acme/m, base_env: {UCX_NET_DEVICES: mlx5}}
hardware_overrides:
  hopper: {extra_args: [--seqs, '5', --json, '{"a": 1}', --mm-encoder-tp-mode, data], extra_env: {H: '1'}}
  h200: {extra_args: [--x]}
variants:
  default: {hardware_overrides: {h200: {extra_args: [--moe, special]}, hopper: {extra_args: [--moe, general]}}}
strategy_overrides:
  single_node_tp: {extra_args: [--seqs, '9']}
  single_node_tep: {hardware_overrides: {hopper: {extra_env: {R: '1'}}}}
  pd_cluster: {extra_args: [--lost], prefill: {tp: 4}}
features:
  json: {args: [--json, '{"b": 2}', --json.c, '3']}
  text_only: {args: [--language-model-only]}
  backend: {args: [--attention-backend, TOKENSPEED_MLA]}
"""


def test_what_surprises_is_told_with_where_it_stands(shelf):
    shelf.write(SURPRISING)
    found = warnings(shelf, features=("json", "text_only", "backend"))
    assert "--seqs 9" in found["tuning-undone"] or "--moe special" in found["tuning-undone"]
    assert "a of hardware" in found["json-replaced"]
    assert "--json.c and --json" in found["dotted-and-whole"]
    assert "hardware_overrides.h200 is not read" in found["never-read"]
    assert "nothing to act on" in found["text-only-with-encoder"]
    assert "needs compute capability 10" in found["backend-hardware"]
    assert "hardware_overrides.hopper" in warnings(shelf, "single_node_tep")["block-replaced"]
    pools = {"prefill": PoolChoice(1), "decode": PoolChoice(1)}
    pooled = deployment(shelf, "pd_cluster", pools=pools).of_kind("warning")
    texts = "\n".join(map(str, pooled))
    assert "strategy_overrides.pd_cluster.extra_args is not read" in texts
    assert "strategy_overrides.pd_cluster.prefill.tp is not read in a tp pool" in texts
    assert "UCX_NET_DEVICES is removed" in texts


def test_a_plain_recipe_warns_of_nothing(shelf):
    assert warnings(shelf.write("")) == {}


def test_every_node_of_both_pools_gets_its_command_and_each_finding_is_told_once(shelf):
    shelf.write("strategy_overrides: {pd_cluster: {decode: {parallelism: dep}}}\nstrategy_min_gpus: {dep: 32}")
    found = deployment(shelf, "pd_cluster", pools={"prefill": PoolChoice(1), "decode": PoolChoice(3)})
    assert [command.name for command in found.commands] == [
        "prefill-node-1", "decode-node-1", "decode-node-2", "decode-node-3",
    ]  # fmt: skip
    assert [finding.rule for finding in found.of_kind("refusal")] == ["below-floor"]
    with pytest.raises(UserError, match="needs 32 GPUs, here are 24"):
        found.refuse()
    found.refuse(below_floor=True)
    assert json.loads(json.dumps(found.to_json()))["pools"] == {"prefill": {"nodes": 1}, "decode": {"nodes": 3}}


def test_one_settings_history_is_told_from_the_last_to_the_first(shelf):
    shelf.write(
        "model: {model_id: m, base_args: [--x, '1'], base_env: {E: a}}\nhardware_overrides: {hopper: {extra_args: [--x, '2'], extra_env: {E: b}}}"
    )
    commands = deployment(shelf).commands
    assert explain_lines(commands, "x") == [
        "single: --x 2",
        "  from hardware: models/acme/m.yaml:2: hardware_overrides.hopper.extra_args",
        "  instead of --x 1, from base: models/acme/m.yaml:1: model.base_args",
    ]
    assert explain_lines(commands, "E")[0] == "single: E=b"
    assert "parallel sizes: 8 GPUs a node" in explain_lines(commands, "-tp")[1]
    with pytest.raises(UserError, match="setting --y: unknown"):
        explain_lines(commands, "--y")


def test_a_shells_line_quotes_json_and_leaves_variables_to_the_shell(shelf):
    shelf.write("""
        model:
          model_id: m
          base_args: [--c, '{"a": "b c"}', --url, 'http://$HEAD_IP:1"`', --price, $5]
          base_env: {A: x y}
    """)
    line = shell_line(deployment(shelf, "multi_node_tp", nodes=2).commands[1])
    assert line.startswith('A=\'x y\' NCCL_SOCKET_IFNAME="$IFACE_NAME" vllm serve m --c \'{"a": "b c"}\'')
    assert '--url "http://$HEAD_IP:1\\"\\`" --price \'$5\'' in line
    assert '--master-addr "$HEAD_IP"' in line


def test_the_table_shows_of_a_further_node_only_what_differs(shelf):
    shelf.write("model: {model_id: m, base_args: [--same]}")
    lines = table_lines(deployment(shelf, "multi_node_tp", nodes=2).commands)
    # Commands outside pools are one part: the head whole, the worker by what differs.
    assert lines[0] == "head: vllm serve m"
    rest = lines[lines.index("worker_1: as head, but") :]
    assert any("--node-rank 1" in line for line in rest)
    assert not any("--same" in line for line in rest)


def test_two_choices_are_put_side_by_side_with_both_origins(shelf):
    shelf.write(
        "hardware_overrides: {hopper: {extra_args: [--x, '1', --only]}, blackwell: {extra_args: [--x, '2'], extra_env: {E: '1'}}}"
    )
    rows = differences(deployment(shelf).commands, deployment(shelf, hardware="b200").commands)
    assert [(row["setting"], row["left"], row["right"]) for row in rows] == [
        ("--x", "1", "2"), ("--only", "(set)", None), ("E", None, "1"),
    ]  # fmt: skip
    assert "hardware_overrides.hopper.extra_args" in rows[0]["left_origin"]
    assert differences(deployment(shelf).commands, deployment(shelf).commands) == []


def test_what_is_left_open_is_taken_from_the_recipe_and_said(shelf):
    shelf.write("""
        meta: {default_hardware: mi300x}
        variants: {default: {vram_minimum_gb: 2000}, small: {}}
        features: {a: {args: [--a]}, b: {args: [--b]}, c: {modes: {x: {}, y: {}}}}
        opt_in_features: [b]
        strategy_overrides: {pd_cluster: {prefill: {nodes: 3}, decode: {nodes: {mi300x: 4, default: 1}}}}
    """)
    completed = complete(shelf.library, Request("acme/m", features=("b", "c=y"), without=("a",)))
    choice = completed.choice
    assert (choice.hardware, choice.strategy, choice.nodes) == ("mi300x", "multi_node_tp", 2)
    assert (choice.features, choice.modes, choice.asked) == (("b", "c"), {"c": "y"}, frozenset({"b", "c"}))
    assert completed.assumed == ("variant default", "hardware mi300x", "strategy multi_node_tp", "2 nodes")
    pools = complete(shelf.library, Request("acme/m", strategy="pd_cluster", prefill_nodes=1)).choice.pools
    assert (pools["prefill"].nodes, pools["decode"].nodes) == (1, 4)
    assert complete(shelf.library, Request("acme/m", only_these=True, features=("b",))).choice.features == ("b",)


def test_a_recipe_in_short(shelf):
    shelf.write("meta: {title: M}\nvariants: {default: {vram_minimum_gb: 100}}\nfeatures: {a: {modes: {x: {}}}}")
    assert summarise(shelf.library, "acme/m")["variants"] == ["default"]
    found = describe(shelf.library, "acme/m")
    assert found["variants"]["default"]["declared_minimum_gb"] == 100
    assert found["features"]["a"]["modes"] == ["x"]
    assert "multi_node_tp (2 nodes, floor 1)" in found["strategies_on"]["h200"]
