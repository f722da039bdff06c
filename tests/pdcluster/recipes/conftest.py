"""Small recipe directories written by the tests, and the corpus of recipes where it lies beside this checkout."""

import textwrap
from pathlib import Path

import pytest

from pdcluster.recipes.choice import Choice, select
from pdcluster.recipes.library import Library
from pdcluster.recipes.resolve import resolve

SHARED = Path(__file__).parents[3].parent / "shared"

TAXONOMY = """
hardware_profiles:
  h200: {brand: NVIDIA, generation: hopper, gpu_count: 8, vram_gb: 1128}
  b200: {brand: NVIDIA, generation: blackwell, gpu_count: 8, vram_gb: 1440}
  gb300: {brand: NVIDIA, generation: blackwell, gpu_count: 4, vram_gb: 1152}
  mi300x: {brand: AMD, generation: amd, gpu_count: 8, vram_gb: 1536}
  spark: {brand: NVIDIA, generation: blackwell, gpu_count: 1, vram_gb: 128}
  desk: {brand: NVIDIA, generation: blackwell, gpu_count: 1, vram_gb: 96, scalable: false, restricted: true}
  xeon: {brand: Intel, generation: cpu, gpu_count: 4, vram_gb: 1024, restricted: true}
strategies: [single_node_tp, single_node_tep, single_node_dep, multi_node_tp, multi_node_tp_pp, multi_node_tp_dp,
  multi_node_dep, pd_cluster]
kv_offload:
  simple: {args: [--kv-transfer-config, '{"kv_connector":"SimpleCPUOffloadConnector"}'], env: {SEED: 0}}
  tiered: {requires_opt_in: true, brands: [NVIDIA], strategies: [single_node_tp], args: [--tiered]}
"""
_TP = "parallel_flag: --tensor-parallel-size"
_MULTI = "deploy_type: multi_node, env: {NCCL_SOCKET_IFNAME: $IFACE_NAME}"
STRATEGIES = {
    "single_node_tp": f"{{deploy_type: single_node, vllm_args: [], {_TP}}}",
    "single_node_tep": f"{{deploy_type: single_node, vllm_args: [--enable-expert-parallel], {_TP}}}",
    "single_node_dep": "{deploy_type: single_node, vllm_args: [--enable-expert-parallel], parallel_flag: --data-parallel-size}",
    "multi_node_tp": f"{{{_MULTI}, {_TP}}}",
    "multi_node_tp_pp": f"{{{_MULTI}, parallelism: tp_pp, {_TP}}}",
    "multi_node_tp_dp": f"{{{_MULTI}, parallelism: tp_dp, {_TP}}}",
    "multi_node_dep": f"{{{_MULTI}, vllm_args: [--data-parallel-hybrid-lb], parallel_flag: --data-parallel-size}}",
    "pd_cluster": """
deploy_type: pd_cluster
prefill: {vllm_args: [--port, '8001'], env: {NCCL_CUMEM_ENABLE: '1', VLLM_NIXL_SIDE_CHANNEL_HOST: $PREFILL_NODE_1}}
decode: {vllm_args: [--port, '8002'], env: {VLLM_NIXL_SIDE_CHANNEL_HOST: $DECODE_NODE_1}}
""",
}
STORE = """
vllm: {vllm_args: [--kv-transfer-config, store], env: {PYTHONHASHSEED: 0}}
pd: {prefill: {args: [--kv-transfer-config, both-p]}, decode: {args: [--kv-transfer-config, both-d]}}
"""
ALL = list(STRATEGIES)


class Shelf:
    """A recipe directory in the making: write recipes, resolve choices within it."""

    def __init__(self, root):
        self.root = root
        for folder in ("models/acme", "strategies", "kv_store"):
            (root / folder).mkdir(parents=True)
        (root / "taxonomy.yaml").write_text(TAXONOMY)
        (root / "kv_store/pool.yaml").write_text(STORE)
        for name, text in STRATEGIES.items():
            (root / f"strategies/{name}.yaml").write_text(text)

    def write(self, text, name="acme/m"):
        """Write a recipe; what it leaves out is an empty model with every strategy."""
        text = textwrap.dedent(text)
        if "\nmodel:" not in "\n" + text:
            text += "\nmodel: {model_id: acme/m}"
        if "\nvariants:" not in "\n" + text:
            text += "\nvariants: {default: {}}"
        if "\ncompatible_strategies:" not in "\n" + text:
            text += f"\ncompatible_strategies: [{', '.join(ALL)}]"
        path = self.root / "models" / f"{name}.yaml"
        path.parent.mkdir(exist_ok=True)
        path.write_text(text.lstrip("\n"))
        return self

    @property
    def library(self):
        return Library(self.root)

    def resolve(self, strategy="single_node_tp", hardware="h200", *, published=False, **choice):
        chosen = Choice("acme/m", strategy, hardware, **choice)
        return resolve(select(self.library, chosen), published=published)

    def argv(self, *arguments, command=None, **choice):
        """Return what follows the model in the one command's argv, or in the named one's."""
        commands = {item.name: item for item in self.resolve(*arguments, **choice).commands}
        return commands[command or next(iter(commands))].argv[3:]

    def env(self, *arguments, command=None, **choice):
        commands = {item.name: item for item in self.resolve(*arguments, **choice).commands}
        return commands[command or next(iter(commands))].env


@pytest.fixture
def shelf(tmp_path):
    return Shelf(tmp_path / "recipes")


@pytest.fixture(scope="session")
def corpus():
    """The collection of recipes that is handed out with this project, read once."""
    if not (SHARED / "recipes-corpus").is_dir():
        pytest.skip("the corpus of recipes is not beside this checkout")
    return Library(SHARED / "recipes-corpus")


@pytest.fixture(scope="session")
def golden():
    """Where the golden cases lie."""
    if not (SHARED / "recipes-golden").is_dir():
        pytest.skip("the golden cases are not beside this checkout")
    return SHARED / "recipes-golden"
