"""The NIXL poll plugin against a made-up NIXL on disk, and against the installed one where there is one."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import subprocess
import sys
from types import ModuleType

import pytest

from pdcluster import nixl_poll

BINDINGS = """
class nixlAgentConfig:
    useProgThread = False
    pthrDelay = 7
"""
API = """
from . import _bindings as nixlBind

def agent_config():
    config = nixlBind.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = 0
    return config
"""


@pytest.fixture
def nixl(tmp_path, monkeypatch):
    """Return a function that installs a made-up NIXL; whatever a test imports or registers is undone."""
    for name in [name for name in sys.modules if name.partition(".")[0].startswith("nixl")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.setenv("PDCLUSTER_NIXL_POLL_US", "2000")
    before = set(sys.modules)

    def install(package="nixl_cu13", *, bindings=BINDINGS, api=API):
        folder = tmp_path / package
        folder.mkdir()
        for name, text in (("__init__.py", ""), ("_bindings.py", bindings), ("_api.py", api)):
            (folder / name).write_text(text)
        importlib.invalidate_caches()

    yield install
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("package", ["nixl_cu13", "nixl_cu12"])
def test_the_delay_is_pinned_whatever_nixl_sets_it_to(nixl, package):
    nixl(package)
    nixl_poll.register()
    config = importlib.import_module(f"{package}._api").agent_config()
    assert config.pthrDelay == 2000
    assert config.useProgThread is True


def test_the_plugin_leaves_the_import_of_nixl_to_vllm(nixl):
    nixl()
    nixl_poll.register()
    assert not any(name.startswith("nixl_cu") for name in sys.modules)


def test_a_nixl_that_was_imported_before_is_pinned_too(nixl):
    nixl()
    api = importlib.import_module("nixl_cu13._api")
    nixl_poll.register()
    assert api.agent_config().pthrDelay == 2000


def test_registering_twice_pins_once(nixl):
    nixl()
    nixl_poll.register()
    nixl_poll.register()
    api = importlib.import_module("nixl_cu13._api")
    nixl_poll.register()
    assert len(api.nixlBind.nixlAgentConfig.__mro__) == 3  # the pinned class, NIXL's own, object
    assert sum(isinstance(finder, nixl_poll._PinAtImport) for finder in sys.meta_path) == 1


def test_without_the_variable_nothing_is_touched(nixl, monkeypatch):
    nixl()
    monkeypatch.delenv("PDCLUSTER_NIXL_POLL_US")
    finders = list(sys.meta_path)
    nixl_poll.register()
    assert sys.meta_path == finders
    assert importlib.import_module("nixl_cu13._api").agent_config().pthrDelay == 0


@pytest.mark.parametrize("value", ["0", "-5", "2ms", "1.5", "²"])
def test_a_value_that_is_no_positive_integer_is_warned_about_and_ignored(nixl, monkeypatch, caplog, value):
    nixl()
    monkeypatch.setenv("PDCLUSTER_NIXL_POLL_US", value)
    nixl_poll.register()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"PDCLUSTER_NIXL_POLL_US={value}" in caplog.text
    assert importlib.import_module("nixl_cu13._api").agent_config().pthrDelay == 0


def test_a_host_without_nixl_gets_one_warning(nixl, caplog):
    nixl_poll.register()
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "NIXL is not installed" in caplog.text


@pytest.mark.parametrize(
    ("bindings", "api"),
    [
        ("", "from . import _bindings as nixlBind"),
        ("nixlAgentConfig = None", "from . import _bindings as nixlBind"),
        ("class nixlAgentConfig: pass", "from . import _bindings as nixlBind"),
        ("", ""),
    ],
)
def test_a_nixl_without_the_setting_is_imported_with_one_warning(nixl, caplog, bindings, api):
    nixl(bindings=bindings, api=api)
    nixl_poll.register()
    importlib.import_module("nixl_cu13._api")
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "will spin" in caplog.text


def test_an_error_inside_nixl_reaches_its_importer(nixl):
    nixl(api="raise ImportError('libucp.so is missing')")
    nixl_poll.register()
    with pytest.raises(ImportError, match=r"libucp\.so is missing"):
        importlib.import_module("nixl_cu13._api")


def test_a_package_without_the_module_is_not_found_as_ever(nixl, tmp_path):
    nixl()
    (tmp_path / "nixl_cu13" / "_api.py").unlink()
    nixl_poll.register()
    with pytest.raises(ModuleNotFoundError, match="nixl_cu13"):
        importlib.import_module("nixl_cu13._api")


def test_a_module_without_a_spec_does_not_make_registering_fail(nixl, monkeypatch, caplog):
    for package in ("nixl_cu13", "nixl_cu12"):
        module = ModuleType(package)
        module.__spec__ = None
        monkeypatch.setitem(sys.modules, package, module)
    nixl_poll.register()
    assert "NIXL is not installed" in caplog.text


@pytest.mark.skipif(not importlib.util.find_spec("nixl"), reason="NIXL is not installed")
def test_the_installed_nixl_takes_the_pinned_delay():
    program = """
import sys
from pdcluster.nixl_poll import register
register()
assert not [name for name in sys.modules if name.startswith("nixl")]
import nixl._api
config = nixl._api.nixlBind.nixlAgentConfig()
config.pthrDelay = 0
print(config.pthrDelay)
"""
    # In a process of its own: NIXL's native libraries can't be unloaded.
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PDCLUSTER_NIXL_POLL_US": "2000", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.split() == ["2000"]


def test_vllm_finds_the_plugin():
    entry_points = importlib.metadata.entry_points(group="vllm.general_plugins")
    assert entry_points["pdcluster_nixl_poll"].load() is nixl_poll.register
