import pytest

from pdcluster.recipes.choice import PoolChoice
from pdcluster.recipes.tokens import value_of

LAYERED = """
model:
  model_id: acme/m
  base_args: [--x, base, --only-base]
  base_env: {X: base, ONLY_BASE: '1'}
variants:
  default:
    extra_args: [--x, variant]
    extra_env: {X: variant}
    hardware_overrides:
      h200: {extra_args: [--x, variant-h200], extra_env: {X: variant-h200}}
      hopper: {extra_args: [--v, hopper], extra_env: {V: hopper}}
      nvidia: {extra_args: [--v, nvidia]}
hardware_overrides:
  hopper: {extra_args: [--x, hopper], extra_env: {X: hopper}}
  h200: {extra_args: [--never-read]}
  nvidia: {extra_args: [--x, nvidia]}
strategy_overrides:
  single_node_tp:
    extra_args: [--s, extra]
    vllm_args: [--s, vllm]
    env: {S: env}
    extra_env: {S: extra}
    hardware_overrides:
      h200: {extra_args: [--e, strategy-h200], extra_env: {E: strategy-h200}}
  single_node_tep:
    hardware_overrides: {nvidia: {extra_env: {R: '1'}}}
features:
  tools: {args: [--x, tools]}
"""


def test_layers_apply_in_order_and_each_setting_keeps_its_origin_and_what_it_displaced(shelf):
    resolution = shelf.write(LAYERED).resolve(features=("tools",), user_args=("--x", "user"))
    (command,) = resolution.commands
    unit = value_of(command.units, "--x")
    assert unit.value == "tools"
    assert (unit.origin.file, unit.origin.layer) == ("models/acme/m.yaml", "feature tools")
    assert unit.origin.document.where(unit.origin.path) == "models/acme/m.yaml:28: features.tools.args"
    assert [item.value for item in unit.displaced] == ["base", "variant", "variant-h200", "hopper", "user"]
    assert command.env == {
        "X": "hopper",
        "ONLY_BASE": "1",
        "V": "hopper",
        "S": "extra",
        "E": "strategy-h200",
    }
    setting = next(item for item in command.environment if item.name == "X")
    assert [value for value, _ in setting.displaced] == ["base", "variant", "variant-h200"]


def test_exact_ids_at_the_top_level_are_not_read_and_nvidia_stands_in_for_an_absent_generation(shelf):
    shelf.write(LAYERED)
    assert "--never-read" not in shelf.argv()
    assert shelf.argv(hardware="b200") == [
        "--only-base",
        "--tensor-parallel-size",
        "8",
        "--s",
        "vllm",
        "--x",
        "nvidia",
        "--v",
        "nvidia",
    ]
    assert "--v" not in shelf.argv(hardware="mi300x")


def test_a_strategys_block_for_the_generation_replaces_the_recipes_and_the_variants(shelf):
    shelf.write(LAYERED)
    assert shelf.argv("single_node_tep") == [
        "--only-base",
        "--x",
        "variant-h200",
        "--enable-expert-parallel",
        "--tensor-parallel-size",
        "8",
    ]
    assert shelf.env("single_node_tep") == {"X": "variant-h200", "ONLY_BASE": "1", "R": "1"}


def test_an_empty_block_replaces_too(shelf):
    shelf.write(
        "hardware_overrides: {hopper: {extra_args: [--gone]}}\nstrategy_overrides: {single_node_tp: {hardware_overrides: {hopper: {}}}}"
    )
    assert shelf.argv() == ["--tensor-parallel-size", "8"]


def test_the_variants_own_checkpoint_is_served(shelf):
    shelf.write("variants: {default: {}, fp8: {model_id: acme/m-fp8}}")
    assert shelf.resolve(variant="fp8").commands[0].argv[:3] == ["vllm", "serve", "acme/m-fp8"]


@pytest.mark.parametrize(
    ("variant", "override", "hardware", "size"),
    [
        ("{}", "{}", "h200", 8),
        ("{vram_minimum_gb: 141}", "{}", "h200", 1),
        ("{vram_minimum_gb: 142}", "{}", "h200", 8),
        ("{tp: 2, vram_minimum_gb: 1}", "{tp: 4}", "h200", 2),
        ("{tp: {hopper: 4, h200: 2}}", "{}", "h200", 2),
        ("{tp: {nvidia: 4, default: 2}}", "{}", "b200", 4),
        ("{tp: {default: 2}}", "{}", "mi300x", 2),
        ("{tp: {hopper: 4}}", "{tp: 2}", "b200", 2),
        ("{tp: 16}", "{}", "gb300", 4),
        ("{tp: 16}", "{}", "xeon", 16),
        ("{tp: 0}", "{}", "gb300", 4),
    ],
)
def test_the_size_on_one_node_is_declared_or_follows_from_memory(shelf, variant, override, hardware, size):
    shelf.write(f"variants: {{default: {variant}}}\nstrategy_overrides: {{single_node_tp: {override}}}")
    assert shelf.argv(hardware=hardware) == ["--tensor-parallel-size", str(size)]


@pytest.mark.parametrize(
    ("strategy", "head", "worker"),
    [
        ("multi_node_tp", "--tensor-parallel-size 16 --nnodes 2 --node-rank 0 --master-addr $HEAD_IP",
         "--tensor-parallel-size 16 --nnodes 2 --node-rank 1 --master-addr $HEAD_IP --headless"),
        ("multi_node_tp_pp", "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 0 --master-addr $HEAD_IP",
         "--tensor-parallel-size 8 --pipeline-parallel-size 2 --nnodes 2 --node-rank 1 --master-addr $HEAD_IP --headless"),
        ("multi_node_dep", "--data-parallel-hybrid-lb --data-parallel-size 16 --data-parallel-size-local 8 --data-parallel-address $HEAD_IP",
         "--data-parallel-hybrid-lb --data-parallel-size 16 --data-parallel-size-local 8 --data-parallel-address $HEAD_IP --data-parallel-start-rank 8"),
    ],
)  # fmt: skip
def test_every_node_of_a_deployment_gets_its_own_command(shelf, strategy, head, worker):
    shelf.write("")
    assert shelf.argv(strategy, nodes=2) == head.split()
    assert shelf.argv(strategy, nodes=2, command="worker_1") == worker.split()


def test_replicas_on_several_nodes_all_balance_their_own_ranks(shelf):
    resolution = shelf.write("").resolve("multi_node_tp_dp", nodes=2)
    for command in resolution.commands:
        assert command.argv[-1] == "--data-parallel-hybrid-lb"
    assert {finding.rule for finding in resolution.of_kind("correction")} == {"tp-dp-hybrid-lb"}
    assert "--data-parallel-hybrid-lb" not in shelf.argv("multi_node_tp_dp", nodes=2, published=True)


def test_total_and_start_rank_follow_the_local_size_that_won(shelf):
    shelf.write("hardware_overrides: {hopper: {extra_args: [--data-parallel-size-local, '4']}}")
    assert shelf.argv("multi_node_dep", nodes=3, command="worker_2") == [
        "--data-parallel-hybrid-lb",
        "--data-parallel-size",
        "12",
        "--data-parallel-address",
        "$HEAD_IP",
        "--data-parallel-start-rank",
        "8",
        "--data-parallel-size-local",
        "4",
    ]
    assert "16" in shelf.argv("multi_node_dep", nodes=3, command="worker_2", published=True)


@pytest.mark.parametrize(
    ("choice", "rule", "words"),
    [
        ({"strategy": "multi_node_tp", "nodes": 1}, "nodes", "single_node strategy"),
        ({"strategy": "single_node_tp", "nodes": 2}, "nodes", "multi_node strategy"),
        ({"strategy": "single_node_tep", "hardware": "gb300"}, "below-floor", "give 2 nodes of gb300"),
        ({"strategy": "single_node_dep"}, "sizes-against-gpus", "strategy_overrides.single_node_dep.extra_args"),
        ({"features": ("dcp",), "hardware": "gb300"}, "dcp-divides-tp", "leave decode_context_parallelism out"),
        ({"features": ("text_only", "encoder_parallel")}, "text-only-with-encoder", "choose one"),
        ({"kv_offload": "tiered", "strategy": "pd_cluster", "nodes": 2}, "offload-with-pd", "KV store"),
        ({"kv_offload": "tiered", "strategy": "single_node_tep"}, "offload-strategy", "single_node_tp"),
        ({"kv_offload": "tiered", "hardware": "mi300x"}, "offload-brand", "NVIDIA"),
        ({"kv_offload": "tiered"}, "offload-unverified", "verified run"),
    ],
)
def test_what_cannot_work_is_refused_with_the_rule_and_what_to_choose_instead(shelf, choice, rule, words):
    shelf.write("""
        strategy_min_gpus: {single_node_tep: 8}
        strategy_overrides: {single_node_dep: {extra_args: [--data-parallel-size, '16']}}
        features:
          dcp: {args: [--decode-context-parallel-size, '8']}
          text_only: {args: [--language-model-only]}
          encoder_parallel: {args: [--mm-encoder-tp-mode, data]}
    """)
    refusals = {finding.rule: str(finding) for finding in shelf.resolve(**choice).of_kind("refusal")}
    assert rule in refusals
    assert words in refusals[rule]


def test_a_flag_and_its_value_in_one_token_are_split_and_said_so(shelf):
    resolution = shelf.write("model: {model_id: m, base_args: ['--max-model-len auto', '--c {\"a\": 1}']}").resolve()
    assert resolution.commands[0].argv[3:7] == ["--max-model-len", "auto", "--c", '{"a": 1}']
    (first, _) = resolution.of_kind("correction")
    assert (first.rule, "model.base_args[0]" in str(first)) == ("split-token", True)
    assert "--max-model-len auto" in shelf.argv(published=True)


def test_numbers_and_truth_values_become_text(shelf):
    shelf.write("model: {model_id: m, base_args: [--a, 0, --b, true], base_env: {N: 0, B: false}}")
    assert shelf.argv()[:4] == ["--a", "0", "--b", "true"]
    assert shelf.env() == {"N": "0", "B": "false"}


def test_kv_offload_and_kv_store_come_last(shelf):
    shelf.write("")
    assert shelf.argv(kv_offload="simple")[-2:] == [
        "--kv-transfer-config",
        '{"kv_connector":"SimpleCPUOffloadConnector"}',
    ]
    assert shelf.env(kv_offload="simple") == {"SEED": "0"}
    assert shelf.argv(kv_store="pool")[-1] == "store"
    assert shelf.argv("pd_cluster", nodes=2, kv_store="pool", command="decode")[-1] == "both-d"
    assert shelf.env("pd_cluster", nodes=2, kv_store="pool", command="decode")["PYTHONHASHSEED"] == "0"


def test_a_pool_over_two_nodes_joins_them_or_runs_a_server_on_each(shelf):
    shelf.write("strategy_overrides: {pd_cluster: {decode: {parallelism: dep, tp: 2}, prefill: {parallelism: tep}}}")
    pools = {"prefill": PoolChoice(2, 1), "decode": PoolChoice(2, 1)}
    assert shelf.argv("pd_cluster", pools=pools, command="prefill") == [
        "--port",
        "8001",
        "--tensor-parallel-size",
        "16",
        "--enable-expert-parallel",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "$PREFILL_NODE_1",
        "--headless",
    ]
    assert shelf.argv("pd_cluster", pools=pools, command="decode") == [
        "--port",
        "8002",
        "--tensor-parallel-size",
        "2",
        "--data-parallel-size",
        "8",
        "--data-parallel-size-local",
        "4",
        "--data-parallel-start-rank",
        "4",
        "--data-parallel-address",
        "$DECODE_NODE_1",
        "--data-parallel-rpc-port",
        "$DECODE_DP_RPC_PORT",
        "--data-parallel-hybrid-lb",
        "--enable-expert-parallel",
    ]
    assert shelf.env("pd_cluster", pools=pools, command="decode") == {
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7", "GLOO_SOCKET_IFNAME": "$IFACE_NAME",
        "NCCL_SOCKET_IFNAME": "$IFACE_NAME", "VLLM_NIXL_SIDE_CHANNEL_HOST": "$DECODE_NODE_2",
    }  # fmt: skip
    assert shelf.env("pd_cluster", pools=pools, command="prefill")["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$PREFILL_NODE_1"


def test_pools_on_one_node_share_its_gpus(shelf):
    resolution = shelf.write("strategy_overrides: {pd_cluster: {decode: {parallelism: dep}}}").resolve("pd_cluster")
    prefill, decode = resolution.commands
    assert value_of(prefill.units, "--tensor-parallel-size").value == "4"
    assert value_of(decode.units, "--data-parallel-size").value == "4"
    assert (prefill.env["CUDA_VISIBLE_DEVICES"], decode.env["CUDA_VISIBLE_DEVICES"]) == ("0,1,2,3", "4,5,6,7")
    assert [finding.rule for finding in resolution.of_kind("correction")] == ["co-located-dep"]


def test_two_pools_on_one_gpu_are_refused(shelf):
    resolution = shelf.write("").resolve("pd_cluster", "spark")
    assert {finding.rule for finding in resolution.of_kind("refusal")} == {"co-located-one-gpu"}
    assert "CUDA_VISIBLE_DEVICES" not in resolution.commands[0].env


def test_variables_of_the_trays_fabric_are_removed_elsewhere_whoever_set_them(shelf):
    shelf.write("model: {model_id: m, base_env: {UCX_NET_DEVICES: mlx5_0}}")
    pools = {"prefill": PoolChoice(1), "decode": PoolChoice(1)}
    command = shelf.resolve("pd_cluster", pools=pools).commands[0]
    removed = next(item for item in command.environment if item.name == "UCX_NET_DEVICES")
    assert (removed.value, removed.origin.layer, removed.displaced[0][0]) == (None, "removed", "mlx5_0")
    assert {"UCX_NET_DEVICES", "NCCL_CUMEM_ENABLE"}.isdisjoint(command.env)
    assert shelf.env("pd_cluster", "gb300", pools=pools)["UCX_NET_DEVICES"] == "mlx5_0"
    assert shelf.env(hardware="h200") == {"UCX_NET_DEVICES": "mlx5_0"}


def test_a_parallelism_that_is_not_on_offer_becomes_the_first_that_is_and_the_host_follows(shelf):
    shelf.write("compatible_strategies: [multi_node_dep, pd_cluster]")
    pools = {"prefill": PoolChoice(2, 1, "tp"), "decode": PoolChoice(2, 5, "dep")}
    resolution = shelf.resolve("pd_cluster", pools=pools)
    assert "--data-parallel-size" in resolution.commands[0].argv
    assert resolution.commands[0].env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$PREFILL_NODE_2"
    assert resolution.commands[1].env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$DECODE_NODE_2"
    texts = "\n".join(str(finding) for finding in resolution.of_kind("correction"))
    assert "parallelism tp is not on offer, dep is taken" in texts
    assert "there is no node 6 of 2" in texts
    published = shelf.resolve("pd_cluster", pools=pools, published=True)
    assert published.commands[0].env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$PREFILL_NODE_1"
    assert published.commands[1].env["VLLM_NIXL_SIDE_CHANNEL_HOST"] == "$DECODE_NODE_6"
