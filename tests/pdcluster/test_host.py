"""What is read of a host and of a checkpoint."""

import dataclasses
import json
import sys
from types import SimpleNamespace

import pytest

from pdcluster.errors import UserError
from pdcluster.inventory import Device, Inventory, take_inventory
from pdcluster.memory import cluster_bytes, fit_to_memory
from pdcluster.model_facts import ModelFacts, locate, read_facts
from pdcluster.spec import ClusterSpec

GB = 10**9


class FakeNvml:
    """NVML as nvidia-ml-py offers it, with four devices."""

    class NVMLError(Exception):
        pass

    def __init__(self, count=4):
        self.count = count
        self.shut_down = False

    def nvmlInit(self):  # noqa: N802 - NVML's own names
        if not self.count:
            raise self.NVMLError

    def nvmlShutdown(self):  # noqa: N802
        self.shut_down = True

    def nvmlDeviceGetCount(self):  # noqa: N802
        return self.count

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetMemoryInfo(self, _):  # noqa: N802
        return SimpleNamespace(total=80 * GB, free=79 * GB)

    def nvmlDeviceGetPciInfo(self, index):  # noqa: N802
        return SimpleNamespace(busId=f"00000000:0{index}:00.0".encode())

    def nvmlDeviceGetName(self, _):  # noqa: N802
        return b"NVIDIA H100"

    def nvmlDeviceGetUUID(self, index):  # noqa: N802
        return f"GPU-{index}abc"


@pytest.fixture
def nvml(monkeypatch):
    def install(count=4):
        fake = FakeNvml(count)
        monkeypatch.setitem(sys.modules, "pynvml", fake)
        return fake

    return install


@pytest.fixture
def root(tmp_path):
    """A file system's root with two NUMA nodes and a memory limit."""
    import os

    cores = sorted(os.sched_getaffinity(0))
    for node, listed in ((0, f"{cores[0]}"), (1, f"{cores[-1]},9998-9999")):
        path = tmp_path / f"sys/devices/system/node/node{node}"
        path.mkdir(parents=True)
        (path / "cpulist").write_text(listed + "\n")
    for index, node in enumerate((0, 0, 1, 1)):
        path = tmp_path / f"sys/bus/pci/devices/0000:0{index}:00.0"
        path.mkdir(parents=True)
        (path / "numa_node").write_text(f"{node}\n")
    limits = tmp_path / "sys/fs/cgroup"
    limits.mkdir(parents=True)
    (limits / "memory.max").write_text("3000000\n")
    (limits / "memory.current").write_text("1000000\n")
    return tmp_path


def test_nvidia_devices_come_with_memory_and_numa_node(nvml, root):
    fake = nvml()
    found = take_inventory({}, root)
    assert found.kind == "cuda"
    assert [device.numa_node for device in found.devices] == [0, 0, 1, 1]
    assert found.devices[0] == Device(0, "NVIDIA H100", 80 * GB, 79 * GB, 0)
    assert fake.shut_down


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("2,0", (2, 0)), ("GPU-1", (1,)), ("0,7,1", (0,)), ("3", (3,))],
    ids=["order", "uuid", "cut at unknown", "one"],
)
def test_only_visible_devices_count(nvml, root, visible, indices):
    nvml()
    assert tuple(device.index for device in take_inventory({"CUDA_VISIBLE_DEVICES": visible}, root).devices) == indices


@pytest.mark.parametrize(
    ("variable", "kind"), [("HIP_VISIBLE_DEVICES", "rocm"), ("ASCEND_RT_VISIBLE_DEVICES", "ascend")]
)
def test_other_accelerators_come_from_their_variable(nvml, root, variable, kind):
    nvml(0)
    found = take_inventory({variable: "0, 1,3"}, root)
    assert (found.kind, [device.index for device in found.devices]) == (kind, [0, 1, 3])


def test_a_variable_that_is_no_list_of_numbers_is_refused(nvml, root):
    nvml(0)
    with pytest.raises(UserError, match="HIP_VISIBLE_DEVICES=all: a list of device numbers"):
        take_inventory({"HIP_VISIBLE_DEVICES": "all"}, root)


def test_a_host_without_accelerators_serves_on_its_cores_within_its_limit(nvml, root):
    nvml(0)
    found = take_inventory({}, root)
    assert (found.kind, found.devices) == ("cpu", ())
    assert found.available_bytes == 2_000_000
    assert 1 <= found.core_count <= 2


def test_a_host_that_says_nothing_of_numa_has_one_node(nvml, tmp_path):
    nvml(0)
    assert list(take_inventory({}, tmp_path).cores) == [0]


def write_config(directory, config):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors").write_bytes(b"x" * 1000)
    return directory


def test_facts_come_from_the_config_and_the_size_of_the_weights(tmp_path):
    config = {"architectures": ["A"], "max_position_embeddings": 10, "num_attention_heads": 8, "num_key_value_heads": 2}
    assert read_facts(write_config(tmp_path / "m", config)) == ModelFacts(
        "A", 10, 8, 2, is_mla=False, weight_bytes=1000
    )


def test_facts_of_a_multimodal_model_are_those_of_its_text_part(tmp_path):
    config = {"architectures": ["V"], "text_config": {"max_position_embeddings": 7, "kv_lora_rank": 512}}
    facts = read_facts(write_config(tmp_path / "m", config))
    assert (facts.architecture, facts.max_model_len, facts.is_mla, facts.kv_heads) == ("V", 7, True, None)


def test_a_config_that_is_no_json_is_refused_by_its_path(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json: cannot be read as JSON"):
        read_facts(tmp_path)


def test_a_model_is_an_embedded_name_a_directory_or_a_hub_id(tmp_path):
    assert locate("tiny", ["tiny"]) is None
    assert locate("org/model", ["tiny"]) is None
    assert locate(str(tmp_path), ["tiny"]) == tmp_path
    for wrong in ("tine", "./none", "a/b/c", "/none"):
        with pytest.raises(UserError, match=f"model {wrong}"):
            locate(wrong, ["tiny"])


FACTS = ModelFacts("A", 8192, 8, 8, is_mla=False, weight_bytes=540_000_000)


def spec(prefill, decode):
    return ClusterSpec.model_validate({"pools": {"prefill": {"replicas": prefill}, "decode": {"replicas": decode}}})


def test_six_small_engines_are_estimated_near_what_was_measured():
    assert cluster_bytes(spec(2, 4), FACTS) / GB == pytest.approx(15.7, rel=0.12)


@pytest.mark.parametrize(
    ("available", "fitting"),
    [
        (24, {"prefill": 2, "decode": 4}),
        (15, {"prefill": 2, "decode": 3}),
        (10, {"prefill": 1, "decode": 2}),
        (1, {"prefill": 1, "decode": 1}),
    ],
)
def test_the_larger_pool_gives_up_engines_first_and_each_keeps_one(available, fitting):
    host = Inventory("cpu", available_bytes=available * GB)
    assert fit_to_memory(spec(2, 4), host, FACTS) == fitting


def test_memory_of_accelerators_is_not_the_hosts():
    host = Inventory("cuda", available_bytes=1)
    assert fit_to_memory(spec(2, 4), host, FACTS) == {"prefill": 2, "decode": 4}
    assert dataclasses.replace(host, cores={0: (0, 1), 1: (2,)}).core_count == 3
