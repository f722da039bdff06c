import dataclasses
import json
import shlex
import subprocess

import pytest

from pdcluster.errors import PlanError, SpecError
from pdcluster.inventory import Device, Inventory
from pdcluster.model_facts import Checkpoint, ModelFacts
from pdcluster.plan import http_url, make_plan, plan_proxy
from pdcluster.spec_loading import load_spec, parse_set_flags

GB = 10**9
FACTS = ModelFacts("LlamaForCausalLM", 8192, attention_heads=16, kv_heads=8, is_mla=False, weight_bytes=GB // 2)
LOCAL = Checkpoint("/models/m", local=True, facts=FACTS)
CPU = Inventory("cpu", cores={0: (0, 1)}, memory_bytes=24 * GB, available_bytes=22 * GB)


def gpus(count, nodes=1):
    devices = tuple(Device(i, "H100", 80 * GB, 80 * GB, i * nodes // count) for i in range(count))
    return Inventory("cuda", devices, {0: tuple(range(64))}, 512 * GB, 500 * GB)


def plan(*assignments, inventory=CPU, checkpoint=LOCAL):
    return make_plan(load_spec(None, parse_set_flags(assignments)), inventory, checkpoint, "/usr/bin/python3")


def value(instance, flag):
    argv = list(instance.argv)
    return argv[argv.index(flag) + 1]


def environment(instance):
    return {variable.name: variable.value for variable in instance.environment}


def test_the_same_input_gives_the_same_plan():
    arguments = ("pools.prefill.replicas=2", "pools.decode.replicas=4")
    assert json.dumps(plan(*arguments).to_json()) == json.dumps(plan(*arguments).to_json())


def test_every_port_of_every_instance_is_its_own():
    made = plan(
        "pools.prefill.replicas=3", "pools.decode.replicas=3", "pools.decode.data_parallel_size=4", inventory=gpus(16)
    )
    ports = [port for instance in made.instances for ranges in instance.ports for port in ranges.ports] + [8000]
    assert len(ports) == len(set(ports))
    assert {len(instance.ports[1].ports) for instance in made.of_role("decode")} == {4}


def test_side_channel_ports_in_the_environment_are_those_of_the_plan():
    for instance in plan("pools.decode.replicas=2").instances:
        assert environment(instance)["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(instance.ports[1].first)
        assert environment(instance)["VLLM_NIXL_SIDE_CHANNEL_HOST"] == instance.host


def test_a_proxy_port_among_the_engines_names_both_owners():
    with pytest.raises(SpecError, match=r"proxy\.port: 18104 is the http port of decode-0 too"):
        plan("proxy.port=18104")


def test_ports_past_the_last_are_refused():
    with pytest.raises(SpecError, match="past 65535"):
        plan("ports.base=65000", "pools.decode.replicas=100", "pools.decode.data_parallel_size=4", inventory=gpus(512))


def test_roles_are_producer_and_consumer_with_one_failure_policy():
    made = plan("kv_load_failure_policy=recompute", "kv_lease_duration=60")
    configs = {instance.role: json.loads(value(instance, "--kv-transfer-config")) for instance in made.instances}
    assert (configs["prefill"]["kv_role"], configs["decode"]["kv_role"]) == ("kv_producer", "kv_consumer")
    assert {config["kv_load_failure_policy"] for config in configs.values()} == {"recompute"}
    assert {config["kv_connector_extra_config"]["kv_lease_duration"] for config in configs.values()} == {60}


def test_cpu_hosts_get_float32_exact_kv_and_the_poll_fix_and_gpus_none_of_it():
    cpu, gpu = plan().instances[0], plan(inventory=gpus(2)).instances[0]
    assert value(cpu, "--dtype") == "float32"
    assert value(cpu, "--kv-cache-memory-bytes") == "300000000"
    assert value(cpu, "--max-model-len") == "4096"
    assert environment(cpu)["PDCLUSTER_NIXL_POLL_US"] == "2000"
    assert json.loads(value(cpu, "--kv-transfer-config"))["kv_connector_extra_config"]["num_threads"] == 0
    assert not {"--dtype", "--kv-cache-memory-bytes", "--max-model-len", "--enforce-eager"} & set(gpu.argv)
    assert not {"PDCLUSTER_NIXL_POLL_US", "UCX_TLS", "OMP_NUM_THREADS"} & environment(gpu).keys()


def test_what_the_user_sets_wins_over_a_default_of_the_host():
    instance = plan(
        "pools.prefill.dtype=bfloat16", "pools.decode.dtype=bfloat16", "pools.prefill.env.UCX_TLS=all"
    ).instances[0]
    assert value(instance, "--dtype") == "bfloat16"
    assert environment(instance)["UCX_TLS"] == "all"


def test_every_setting_names_its_origin():
    made = plan("pools.decode.max_num_seqs=8")
    origins = {argument.tokens[0]: argument.origin for argument in made.of_role("decode")[0].arguments}
    assert origins["--max-num-seqs"] == "--set pools.decode.max_num_seqs"
    assert origins["--port"] == "plan"
    assert origins["--dtype"] == "default on CPU hosts"


def test_parallel_sizes_speculation_and_extra_arguments_reach_the_argv():
    instance = plan(
        "pools.decode.tensor_parallel_size=2",
        "pools.decode.enable_expert_parallel=true",
        "pools.decode.speculative={method: ngram, num_speculative_tokens: 3}",
        "pools.decode.extra_args=[--seed, '7']",
        inventory=gpus(3),
    ).of_role("decode")[0]
    assert value(instance, "--tensor-parallel-size") == "2"
    assert "--enable-expert-parallel" in instance.argv
    assert json.loads(value(instance, "--speculative-config")) == {"method": "ngram", "num_speculative_tokens": 3}
    assert instance.argv[-2:] == ("--seed", "7")


def test_json_flags_survive_a_shell():
    made = plan('pools.decode.speculative={method: ngram, note: "it\'s $HOME \\\\ \\"q\\" \\u00e9"}', inventory=gpus(2))
    instance = made.of_role("decode")[0]
    printed = subprocess.run(
        ["sh", "-c", f"set -- {shlex.join(instance.argv)}; printf '%s\\0' \"$@\""], capture_output=True, check=True
    )
    assert tuple(printed.stdout.decode().split("\0")[:-1]) == instance.argv
    assert shlex.split(instance.shell())[-len(instance.argv) :] == list(instance.argv)


def test_secrets_are_hidden_and_the_shell_takes_them_from_its_own_environment():
    instance = plan("pools.decode.env.HF_TOKEN=hf_abc").of_role("decode")[0]
    assert "hf_abc" not in json.dumps(instance.to_json()) + instance.shell()
    assert 'HF_TOKEN="${HF_TOKEN}"' in instance.shell()
    assert environment(instance)["HF_TOKEN"] == "hf_abc"


def test_each_instance_gets_its_own_devices():
    made = plan("pools.prefill.replicas=2", "pools.decode.tensor_parallel_size=2", inventory=gpus(4))
    taken = [index for instance in made.instances for index in instance.devices]
    assert sorted(taken) == [0, 1, 2, 3]
    assert environment(made.instances[0])["CUDA_VISIBLE_DEVICES"] == str(made.instances[0].devices[0])


def test_an_instance_stays_within_a_numa_node_where_one_has_room():
    made = plan("pools.decode.tensor_parallel_size=4", inventory=gpus(8, nodes=2))
    decode = made.of_role("decode")[0].devices
    assert {index // 4 for index in decode} == {1}


def test_a_pool_that_names_its_devices_gets_them():
    made = plan("pools.decode.devices=[0]", inventory=gpus(2))
    assert made.of_role("decode")[0].devices == (0,)
    assert made.of_role("prefill")[0].devices == (1,)


@pytest.mark.parametrize(
    ("assignments", "words"),
    [
        (["pools.decode.replicas=8"], "9 cuda devices are needed.*this host has 4"),
        (["pools.decode.devices=[7]"], "no device 7 on this host"),
        (["pools.decode.devices=[1, 1]"], "named twice"),
        (["pools.decode.devices=[1]", "pools.decode.replicas=2"], "decode-1 needs 1 devices, 0 of those allowed"),
    ],
)
def test_devices_that_are_not_there_are_refused(assignments, words):
    with pytest.raises(PlanError, match=words):
        plan(*assignments, inventory=gpus(4))


def test_devices_on_a_host_without_any_are_refused():
    with pytest.raises(PlanError, match="CPU only"):
        plan("pools.decode.devices=[0]")


def test_too_little_memory_is_refused_with_the_sum():
    small = dataclasses.replace(CPU, available_bytes=4 * GB)
    with pytest.raises(PlanError, match=r"memory: about .* GB are needed .* 4\.0 GB are available"):
        plan("pools.decode.replicas=4", inventory=small)


def test_many_cores_are_bound_within_numa_nodes_and_few_are_shared():
    big = dataclasses.replace(CPU, cores={0: tuple(range(16)), 1: tuple(range(16, 32))}, available_bytes=200 * GB)
    bindings = [
        environment(instance)["VLLM_CPU_OMP_THREADS_BIND"]
        for instance in plan("pools.decode.replicas=3", inventory=big).instances
    ]
    cores = [int(core) for binding in bindings for core in binding.split(",")]
    assert len(cores) == len(set(cores)) == 32
    assert environment(plan().instances[0])["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"


def test_a_model_that_is_not_here_is_planned_with_a_note():
    made = plan(checkpoint=Checkpoint("org/model", local=False, facts=None))
    assert any("were not checked" in note for note in made.notes)
    assert "HF_HUB_OFFLINE" not in environment(made.instances[0])


def test_a_local_checkpoint_never_asks_a_hub():
    assert environment(plan().instances[0])["HF_HUB_OFFLINE"] == "1"


def test_excluded_pairs_reach_the_proxy():
    loaded = load_spec(None, parse_set_flags(["proxy.fallback=none"]))
    made = plan()
    argv = plan_proxy(loaded, made.instances, "python", (("prefill-0", "decode-0"),)).argv
    assert argv[argv.index("--exclude-pair") + 1] == "prefill-0:decode-0"
    assert argv[argv.index("--fallback") + 1] == "none"


@pytest.mark.parametrize(
    ("host", "url"),
    [("10.0.0.1", "http://10.0.0.1:80"), ("fd00::1", "http://[fd00::1]:80"), ("0.0.0.0", "http://127.0.0.1:80")],
)
def test_urls_bracket_ipv6_and_reach_wildcards_on_loopback(host, url):
    assert http_url(host, 80) == url


@pytest.mark.parametrize(
    ("assignments", "inventory", "seconds"), [([], CPU, 120), ([], gpus(2), 30), (["kv_lease_duration=60"], CPU, 60)]
)
def test_the_lease_is_longer_on_cpu_hosts_and_engines_and_proxy_agree_on_it(assignments, inventory, seconds):
    made = plan(*assignments, inventory=inventory)
    argv = made.proxy.argv
    assert argv[argv.index("--lease-seconds") + 1] == str(seconds)
    for instance in made.instances:
        config = json.loads(value(instance, "--kv-transfer-config"))
        assert config["kv_connector_extra_config"]["kv_lease_duration"] == seconds
