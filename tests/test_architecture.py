"""The arrows of the design: who may import whom, and which modules do no I/O."""

import ast
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path for package in ("pdcluster", "proxy") for path in (ROOT / package).rglob("*.py"))

# Lower layers must not import higher ones; a module may import its own layer and any below it.
PDCLUSTER_LAYERS = [
    {"errors"},
    {"spec", "flags", "model_facts", "inventory", "flag_facts", "models", "nixl_poll", "recipes", "replay"},
    {"spec_loading", "kv_transfer", "kv_events", "recipe_layer", "node_args"},
    {"simulation"},
    {"compat", "engine_args", "hosts", "memory", "slots", "plan"},
    {
        "processes",
        "state",
        "backends",
        "engine_key",
        "endpoint_files",
        "argv_check",
        "recipe_lint",
        "diagnosis",
        "pair_check",
        "log_follow",
    },
    {"warmup", "tracking", "cluster_view", "reporting", "doctor", "preflight"},
    {"supervisor", "bench"},
    {"commands"},
    {"cli"},
]
PROXY_LAYERS = [
    {"errors", "shared_counts", "api_keys", "flags", "tls", "breathing"},
    {"workers"},
    {"config", "rate_limits", "shape"},
    {"request", "trace", "exchange"},
    {"firewall", "endpoints", "kv_transfer_metrics", "engine_connection", "client", "tallies"},
    {"engine_client", "metrics", "scheduling", "connectors", "relay", "peek", "linked_client", "client_protocol"},
    {"load", "release", "gate", "kv_events", "tokens", "admission"},
    {"handoff"},
    {"inference"},
    {"own_routes"},
    {"routes", "admin"},
    {"app"},
    {"serving"},
    {"cli"},
]
PURE = (
    "pdcluster/plan.py",
    "pdcluster/slots.py",
    "pdcluster/engine_args.py",
    "pdcluster/kv_transfer.py",
    "pdcluster/kv_events.py",
    "pdcluster/compat.py",
    "pdcluster/flag_facts.py",
    "pdcluster/flags.py",
    "pdcluster/hosts.py",
    "pdcluster/memory.py",
    "pdcluster/node_args.py",
    "pdcluster/simulation/engine.py",
    "pdcluster/simulation/job.py",
    "pdcluster/simulation/leap.py",
    "pdcluster/simulation/leases.py",
    "pdcluster/simulation/prefix_cache.py",
    "pdcluster/recipes/cautions.py",
    "pdcluster/recipes/checks.py",
    "pdcluster/recipes/choice.py",
    "pdcluster/recipes/command.py",
    "pdcluster/recipes/deployment.py",
    "pdcluster/recipes/environment.py",
    "pdcluster/recipes/explaining.py",
    "pdcluster/recipes/extras.py",
    "pdcluster/recipes/features.py",
    "pdcluster/recipes/hardware.py",
    "pdcluster/recipes/layers.py",
    "pdcluster/recipes/matrix.py",
    "pdcluster/recipes/names.py",
    "pdcluster/recipes/offer_line.py",
    "pdcluster/recipes/offers.py",
    "pdcluster/recipes/pools.py",
    "pdcluster/recipes/references.py",
    "pdcluster/recipes/request.py",
    "pdcluster/recipes/resolve.py",
    "pdcluster/recipes/substitution.py",
    "pdcluster/recipes/summary.py",
    "pdcluster/recipes/survey.py",
    "pdcluster/recipes/scalars.py",
    "pdcluster/recipes/sizes.py",
    "pdcluster/recipes/tokens.py",
    "pdcluster/recipes/topology.py",
    "proxy/scheduling",
    "proxy/connectors",
    "proxy/firewall.py",
)
FORBIDDEN_WHEN_PURE = {
    "os",
    "socket",
    "subprocess",
    "httpx",
    "asyncio",
    "pathlib",
    "time",
    "psutil",
    "requests",
    "tempfile",
}


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def top(path: Path) -> str:
    return path.relative_to(ROOT).parts[1].removesuffix(".py")


def test_neither_package_imports_the_other():
    for path in MODULES:
        other = "proxy" if path.is_relative_to(ROOT / "pdcluster") else "pdcluster"
        assert not [name for name in imports(path) if name.split(".")[0] == other], path


@pytest.mark.parametrize(("package", "layers"), [("pdcluster", PDCLUSTER_LAYERS), ("proxy", PROXY_LAYERS)])
def test_imports_point_down_the_layers(package, layers):
    rank = {name: index for index, layer in enumerate(layers) for name in layer}
    for path in (ROOT / package).rglob("*.py"):
        name = top(path)
        if name in ("__init__", "__main__"):
            continue
        assert name in rank, f"{path}: give it a layer in this test"
        for imported in imports(path):
            parts = imported.split(".")
            if parts[0] == package and len(parts) > 1 and parts[1] in rank:
                assert rank[parts[1]] <= rank[name], f"{path} imports {imported}, which is above it"


@pytest.mark.parametrize("place", PURE)
def test_deciding_modules_do_no_io(place):
    path = ROOT / place
    files = [path] if path.is_file() else list(path.rglob("*.py"))
    assert files
    for file in files:
        assert not {name.split(".")[0] for name in imports(file)} & FORBIDDEN_WHEN_PURE, file


def test_every_module_has_a_docstring_and_at_most_400_lines():
    for path in MODULES:
        text = path.read_text()
        assert ast.get_docstring(ast.parse(text)), path
        assert len(text.splitlines()) <= 400, path


def test_functions_have_at_most_60_lines():
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno - node.lineno < 60, f"{path}:{node.lineno} {node.name}"


def test_no_name_that_says_nothing():
    assert not {path.stem for path in MODULES} & {"utils", "util", "common", "helpers", "manager", "core", "misc"}


def test_contributing_has_one_line_for_each_module():
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    for path in MODULES:
        if path.name not in ("__init__.py", "__main__.py"):
            assert f"`{path.relative_to(ROOT)}`" in text, f"{path} is missing from the structure in CONTRIBUTING.md"


def test_every_dependency_is_justified_in_contributing():
    text = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    listed = project["dependencies"] + [item for extra in project["optional-dependencies"].values() for item in extra]
    for requirement in listed:
        name = requirement.split("=")[0].split(">")[0].split("<")[0].split("[")[0]
        assert f"| {name} |" in text, f"{name} has no line in CONTRIBUTING.md"
