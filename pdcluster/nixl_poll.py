"""Let NIXL's progress thread sleep between polls: a vLLM general plugin, loaded in each of vLLM's processes.

NIXL's Python binding sets the thread's poll delay to 0, so that on a CPU host every idle engine burns a core. With
PDCLUSTER_NIXL_POLL_US set (the launcher does so on CPU hosts only) the delay is pinned to that many microseconds;
the thread still wakes up on events. Source: `nixl_agent.__init__` of NIXL 1.5.1.

The plugin never imports NIXL. It acts at the moment vLLM does, because vLLM sets UCX_RCACHE_MAX_UNRELEASED just before
and gives that up, with a warning, where NIXL was imported already; and processes without a NIXL agent (API server,
engine core) shouldn't load UCX at all. Source: `_maybe_set_ucx_rcache_limit` in vLLM 0.32's distributed/nixl_utils.py.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_VARIABLE = "PDCLUSTER_NIXL_POLL_US"
_MODULES = ("nixl_cu13._api", "nixl_cu12._api")  # `nixl` itself only picks one of the two, by torch's CUDA version
_LOG = logging.getLogger("pdcluster.nixl_poll")


def register() -> None:
    """Pin the delay in the NIXL that this process imports; does nothing where the variable isn't set, never raises."""
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return
    if not (text.isascii() and text.isdigit()) or int(text) == 0:
        _LOG.warning("%s=%s is not a number of microseconds above 0; NIXL's progress thread will spin", _VARIABLE, text)
        return
    for module in [sys.modules[name] for name in _MODULES if name in sys.modules]:
        _pin_or_warn(module, int(text))
    if any(isinstance(finder, _PinAtImport) for finder in sys.meta_path):
        return  # plugins may be loaded more than once
    if not any(_is_installed(name.partition(".")[0]) for name in _MODULES):
        _LOG.warning("%s has no effect: NIXL is not installed for %s", _VARIABLE, sys.executable)
        return
    sys.meta_path.insert(0, _PinAtImport(int(text)))


def pin_delay(module: ModuleType, microseconds: int) -> bool:
    """Make agents configured through `module.nixlBind` poll at this interval; false where that can't be done."""
    binding = getattr(module, "nixlBind", None)
    base: Any = getattr(binding, "nixlAgentConfig", None)
    if not isinstance(base, type) or not hasattr(base, "pthrDelay"):
        return False
    if getattr(base, "pinned_by_pdcluster", False):
        return True  # plugins may be loaded more than once

    class PinnedAgentConfig(base):  # type: ignore[misc] # the binding is untyped
        """An agent configuration whose progress thread sleeps between polls."""

        pinned_by_pdcluster = True

        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, microseconds if name == "pthrDelay" else value)

    setattr(binding, "nixlAgentConfig", PinnedAgentConfig)  # noqa: B010 - a C extension's attribute, unknown to types
    return True


class _PinAtImport(MetaPathFinder):
    """Finds nothing by itself: lets Python find NIXL's module, and pins the delay once that module has run."""

    def __init__(self, microseconds: int) -> None:
        self._microseconds = microseconds

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the module's own spec, its loader followed by the pin; None for every other module."""
        if fullname not in _MODULES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        run = spec.loader.exec_module

        def run_and_pin(module: ModuleType) -> None:
            run(module)
            _pin_or_warn(module, self._microseconds)

        spec.loader.exec_module = run_and_pin  # type: ignore[method-assign] # this loader is this spec's alone
        return spec


def _pin_or_warn(module: ModuleType, microseconds: int) -> None:
    if pin_delay(module, microseconds):
        _LOG.info("NIXL's progress thread polls every %d us (%s)", microseconds, module.__name__)
    else:
        _LOG.warning("%s has no nixlBind.nixlAgentConfig.pthrDelay; NIXL's progress thread will spin", module.__name__)


def _is_installed(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):  # ValueError: something put into sys.modules without a spec
        return False
