"""From a recipe to a plan: pools, every node's command, the proxy; what a person sets on top wins."""

import json

import pytest

from pdcluster.errors import PlanError, SpecError, UserError
from pdcluster.flags import normalise
from pdcluster.inventory import Inventory
from pdcluster.model_facts import Checkpoint
from pdcluster.plan import make_plan
from pdcluster.preflight import prepare_plan, refuse_old_vllm, refuse_other_hosts
from pdcluster.recipe_layer import NODE_FLAGS, declared_inventory
from pdcluster.recipes.hardware import Profile
from pdcluster.recipes.library import Library
from pdcluster.recipes.offers import hardware_for
from pdcluster.spec_loading import Flag, load_spec, parse_set_flags

K3 = "moonshotai/Kimi-K3"
ALL = ("prefill", "decode")


def loaded(*assignments, **recipe):
    flags = [Flag("recipe.id", K3, "--recipe")] + [
        Flag(f"recipe.{key}", value, f"--{key}") for key, value in recipe.items()
    ]
    return load_spec(flags=[*flags, *parse_set_flags(assignments)])


def planned(*assignments, **recipe):
    spec = loaded(*assignments, **recipe)
    inventory = declared_inventory(spec.recipe.deployment.selection.profile)
    return make_plan(spec, inventory, Checkpoint(spec.spec.model, local=False, facts=None), "python")


def settings(tokens):
    """{flag: value} of an argv; a repeated flag would be lost, so it must not be repeated."""
    found = {}
    for index, token in enumerate(tokens):
        if token.startswith("--"):
            assert normalise(token) not in found, token
            following = tokens[index + 1] if index + 1 < len(tokens) else "--"
            found[normalise(token)] = "" if following.startswith("--") else following
    return found


def plain(values):
    """What must be the same in the recipe's command and the plan's: all but ports, the transfer and sizes of 1."""
    own = {
        "--host",
        "--port",
        "--kv-transfer-config",
        "--data-parallel-rpc-port",
        "--served-model-name",
        "--shutdown-timeout",
    }
    kept = {
        flag: value
        for flag, value in values.items()
        if flag not in own and (not flag.endswith("-parallel-size") or value != "1")
    }
    if "--speculative-config" in kept:
        kept["--speculative-config"] = json.loads(kept["--speculative-config"])
    if "--data-parallel-size-local" in kept and kept["--data-parallel-size-local"] == kept.get("--data-parallel-size"):
        for flag in NODE_FLAGS:  # all ranks on one node: vLLM needs to be told nothing
            kept.pop(flag, None)
    if "--gpu-memory-utilization" in kept:
        kept["--gpu-memory-utilization"] = float(kept["--gpu-memory-utilization"])
    return kept


def test_every_nodes_command_is_what_the_recipe_resolves_to_for_every_variant_and_hardware():
    library = Library()
    for variant in library.recipe(K3).get("variants"):
        for profile in hardware_for(library.recipe(K3), variant, library.profiles().values()):
            given = {"gpus_per_node": 16} if profile.gpu_count == 0 else {}
            plan = planned(variant=variant, hardware=profile.id, **given)
            recipe = loaded(variant=variant, hardware=profile.id, **given).recipe
            programs = {(item.role, item.node): item for item in (*plan.instances, *plan.followers)}
            assert len(programs) == len(recipe.deployment.commands)
            for command in recipe.deployment.commands:
                program = programs[command.role, command.rank]
                mine = [token.replace("_0_NODE_", "_NODE_") for token in program.argv[3:]]
                assert plain(settings(mine)) == plain(settings(command.argv[3:])), command.name
                environment = {item.name: item.value for item in program.environment}
                theirs = {
                    k: v
                    for k, v in command.env.items()
                    if k not in ("CUDA_VISIBLE_DEVICES", "VLLM_NIXL_SIDE_CHANNEL_PORT")
                }
                assert {k: environment[k].replace("_0_NODE_", "_NODE_") for k in theirs} == theirs, command.name


def test_pools_have_the_recipes_shape_and_counts_are_instances():
    plan = planned(
        "pools.prefill.replicas=2", "pools.decode.replicas=4", variant="nvfp4", hardware="gb300", features=["reasoning"]
    )
    assert [len(plan.of_role(role)) for role in ALL] == [
        2,
        16,
    ]  # a tep instance has one server, a dep instance one a node
    assert [follower.name for follower in plan.followers] == ["prefill-0-node-2", "prefill-1-node-2"]
    assert plan.proxy.argv.count("--decode") == 16
    assert "prefill-1-node-1=http://$PREFILL_1_NODE_1:18100" in plan.proxy.argv
    decode = {item.name: item for item in plan.instances}["decode-3-node-2"]
    assert decode.argv[:3] == ("vllm", "serve", "RedHatAI/Kimi-K3-NVFP4")
    assert settings(decode.argv)["--data-parallel-address"] == "$DECODE_3_NODE_1"
    ranks = next(ports for ports in decode.ports if ports.purpose == "nixl side channel")
    assert ranks.count == 16  # rank r adds r to the port


def test_each_setting_keeps_the_recipes_origin_and_what_is_set_on_top_wins_with_its_own():
    plan = planned(
        "pools.decode.max_num_seqs=99", "pools.decode.extra_args=[--moe-backend, auto, --seed, '7']",
        "pools.decode.env.MINE=1", "pools.decode.speculative.num_speculative_tokens=3", variant="nvfp4", hardware="gb300",
    )  # fmt: skip
    decode = plan.of_role("decode")[0]
    origins = {argument.tokens[0]: (argument.tokens[1:], argument.origin) for argument in decode.arguments}
    assert origins["--max-num-seqs"] == (("99",), "--set pools.decode.max_num_seqs")
    assert origins["--moe-backend"] == (("auto",), "--set pools.decode.extra_args")
    assert origins["--seed"][1] == "--set pools.decode.extra_args"
    assert "strategy_overrides.pd_cluster.decode.vllm_args" in origins["--no-enable-prefix-caching"][1]
    assert json.loads(origins["--speculative-config"][0][0])["num_speculative_tokens"] == 3
    variables = {item.name: item.origin for item in decode.environment}
    assert variables["MINE"] == "--set pools.decode.env.MINE"
    assert "pd_cluster.env" in variables["VLLM_SSM_CONV_STATE_LAYOUT"]


def test_real_addresses_take_the_place_of_the_recipes_variables():
    plan = planned(
        "pools.prefill.hosts=[p1, p2]", "pools.decode.hosts=[d1, d2, d3, d4]", "recipe.variables.IFACE_NAME=eth7",
        variant="nvfp4", hardware="gb300",
    )  # fmt: skip
    text = json.dumps(plan.to_json())
    assert "$" not in text.replace("not known yet", "")
    assert plan.followers[0].host == "p2"
    assert settings(plan.followers[0].argv)["--master-addr"] == "p1"
    hosts = [
        next(v.value for v in item.environment if v.name == "VLLM_NIXL_SIDE_CHANNEL_HOST")
        for item in plan.of_role("decode")
    ]
    assert hosts == ["d1", "d2", "d3", "d4"]
    assert not any("not known yet" in note for note in plan.notes)


def test_variables_that_nobody_gave_a_value_are_named():
    assert any("not known yet: $IFACE_NAME" in note for note in planned(hardware="gb300").notes)


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["pools.decode.hosts=[a]"], ["pools.decode.hosts: 1 hosts for 1 instances of 4 nodes", "name 4"]),
        (["pools.prefill.hosts=[a, a]", "pools.decode.hosts=[b, c, d, e]"], ["a is named twice"]),
        (
            ["pools.prefill.hosts=[a, b]", "pools.decode.hosts=[b, c, d, e]"],
            ["b is named twice (first in pools.prefill.hosts)"],
        ),
        (["pools.decode.decode_context_parallel_size=2"], ["does not divide TP 1"]),
        (["pools.decode.speculative.method=eagle3"], ["same-draft"]),
        (
            ["pools.decode.nodes=4", "pools.decode.data_parallel_size=6"],
            ["6 data-parallel ranks", "allowed: 1, 2, 3, 6"],
        ),
        (["pools.decode.kv_cache_dtype=fp8"], ["same-types"]),
        (["pools.decode.block_size=64"], ["block-size"]),
    ],
)
def test_what_is_set_on_top_is_checked_like_anything_else(assignments, words):
    with pytest.raises(SpecError) as caught:
        planned(*assignments, variant="nvfp4", hardware="gb300")
    for word in words:
        assert word in str(caught.value)


def test_a_node_with_too_few_devices_is_refused():
    with pytest.raises(PlanError, match="16 devices are needed on each host, gb300 has 4"):
        planned("pools.prefill.tensor_parallel_size=32", hardware="gb300")


def test_what_the_recipe_refuses_is_refused_here_too():
    for recipe, words in (
        ({"variant": "nvfp4", "hardware": "h200"}, "needs generation blackwell"),
        ({"hardware": "gb3000"}, "did you mean gb300?"),
        ({"hardware": "b300", "features": ["encoder_parallel"]}, "feature encoder_parallel: unknown"),
    ):
        with pytest.raises(UserError, match=words.replace("?", "\\?")):
            loaded(**recipe)
    with pytest.raises(UserError, match="needs 16 GPUs, here are 8"):
        loaded("pools.decode.nodes=1", hardware="b300")
    assert loaded("pools.decode.nodes=1", hardware="b300", below_floor=True).spec.pools.decode.data_parallel_size == 8


def test_unknown_keys_of_the_recipe_section_are_refused_with_their_path():
    with pytest.raises(SpecError, match=r"recipe\.varient"):
        loaded(varient="nvfp4")
    with pytest.raises(SpecError, match=r"recipe\.id"):
        load_spec(flags=[Flag("recipe.variant", "nvfp4", "--variant")])


def test_speculation_can_be_switched_off_in_both_pools():
    plan = planned("pools.prefill.speculative=null", "pools.decode.speculative=null", hardware="b300")
    assert not any("--speculative-config" in item.argv for item in plan.instances)


def test_pools_that_share_one_node_have_half_its_devices_each():
    spec = loaded(hardware="b300", colocated=True, below_floor=True)
    plan = make_plan(
        spec, declared_inventory(spec.recipe.deployment.selection.profile), Checkpoint("m", False, None), "python"
    )
    assert [item.devices for item in plan.instances] == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert [item.host for item in plan.instances] == ["127.0.0.1", "127.0.0.1"]


def test_only_programs_of_this_host_are_launched_from_it():
    with pytest.raises(PlanError, match="plan --shell"):
        refuse_other_hosts(planned(hardware="gb300"))
    refuse_other_hosts(make_plan(load_spec(), Inventory("cpu"), Checkpoint("m", local=True, facts=None), "python"))


def test_an_older_vllm_than_the_recipe_asks_for_is_refused_unless_allowed(monkeypatch):
    monkeypatch.setattr("pdcluster.preflight.vllm_version", lambda: "0.28.9")
    with pytest.raises(UserError, match=r"needs vLLM 0\.29\.0, here is 0\.28\.9.*--any-vllm"):
        refuse_old_vllm(loaded(hardware="b300"))
    refuse_old_vllm(loaded(hardware="b300", any_vllm=True))
    monkeypatch.setattr("pdcluster.preflight.vllm_version", lambda: "0.32.0")
    refuse_old_vllm(loaded(hardware="b300"))


def test_a_strategy_without_pools_is_not_launched_but_can_be_loaded():
    spec = loaded(hardware="b300", strategy="single_node_tp")
    assert spec.recipe is None
    with pytest.raises(UserError, match=r"plan --recipe moonshotai/Kimi-K3 --strategy single_node_tp"):
        prepare_plan(spec, {}, lambda _: None, build=False)


def test_hardware_with_an_unknown_count_of_devices_is_not_launched_until_it_is_told():
    with pytest.raises(UserError, match="--gpus-per-node"):
        prepare_plan(loaded(variant="ascend_w4a8"), {}, lambda _: None, build=False)
    assert loaded(variant="ascend_w4a8", gpus_per_node=16).spec.pools.prefill.tensor_parallel_size == 16


def test_hardware_that_pdcluster_has_no_backend_for_is_refused():
    with pytest.raises(PlanError, match="not tpu"):
        declared_inventory(Profile("trillium", "Google", "tpu", 8, 256))
    assert declared_inventory(Profile("mi300x", "AMD", "amd", 8, 1536)).kind == "rocm"
    assert declared_inventory(Profile("xeon6", "Intel", "cpu", 4, 1024)).kind == "cpu"


RECIPE = """
model: {{model_id: acme/m, base_args: [{arguments}]}}
variants: {{default: {{vram_minimum_gb: 5}}}}
compatible_strategies: [{strategies}]
"""


@pytest.fixture
def shelf(tmp_path):
    """A directory with one recipe in it."""
    for folder in ("models/acme", "strategies"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "taxonomy.yaml").write_text(
        "hardware_profiles: {h200: {brand: NVIDIA, generation: hopper, gpu_count: 8, vram_gb: 1128}}\n"
    )
    shipped = Library().root / "strategies"
    for name in ("pd_cluster", "single_node_tp"):
        (tmp_path / f"strategies/{name}.yaml").write_text((shipped / f"{name}.yaml").read_text())

    def write(arguments, strategies="single_node_tp, pd_cluster"):
        (tmp_path / "models/acme/m.yaml").write_text(RECIPE.format(arguments=arguments, strategies=strategies))
        return tmp_path

    return write


def own(directory, *assignments, **recipe):
    flags = {"id": "acme/m", "directory": str(directory), **recipe}
    return load_spec(flags=[*(Flag(f"recipe.{k}", v, k) for k, v in flags.items()), *parse_set_flags(assignments)])


def test_a_small_recipe_is_planned_for_this_machine_with_another_model_in_place_of_its_weights(shelf):
    spec = own(shelf("--seed, '3', --max-model-len, auto"), "model=tiny", gpus_per_node=1)
    assert spec.origin("model") == "--set model"
    plan = make_plan(
        spec, Inventory("cpu", memory_bytes=1, available_bytes=1), Checkpoint("/tiny", True, None), "python"
    )
    assert [item.name for item in plan.instances] == ["prefill-0", "decode-0"]
    argv = settings(plan.instances[0].argv)
    assert (argv["--seed"], argv["--max-model-len"], argv["--model"]) == ("3", "auto", "/tiny")
    refuse_other_hosts(plan)


def test_pools_of_a_recipe_that_does_not_offer_them_are_made_only_when_asked(shelf):
    directory = shelf("", strategies="single_node_tp")
    with pytest.raises(UserError, match=r"does not offer pd_cluster.*--any-strategy"):
        own(directory)
    assert own(directory, any_strategy=True).spec.pools.decode.tensor_parallel_size == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--tensor-parallel-size, many", "pools.prefill.max_num_seqs"),
        ("--max-num-seqs, many", "max_num_seqs (base: models/acme/m.yaml:2: model.base_args)"),
        ("--speculative-config, '{broken'", "--speculative-config is not JSON"),
        ("--speculative-config, '[1]'", "must be a JSON object"),
    ],
)
def test_a_recipes_wrong_value_is_refused_with_where_it_stands(shelf, arguments, words):
    if "tensor" in arguments:
        assert own(shelf(arguments)).spec.pools.prefill.tensor_parallel_size == 8  # the topology wins
        return
    with pytest.raises(SpecError) as caught:
        own(shelf(arguments))
    assert words in str(caught.value)
