"""Let NIXL's progress thread sleep between polls: a vLLM general plugin, loaded in each of vLLM's processes.

NIXL's Python binding sets the thread's poll delay to 0, so that on a CPU host every idle engine burns a core. With
PDCLUSTER_NIXL_POLL_US set (the launcher does so on CPU hosts only) the delay is pinned to that many microseconds;
the thread still wakes up on events. Source: `nixl_agent.__init__` of NIXL 1.5.1.
"""

from __future__ import annotations

import importlib
import logging
import os
from types import ModuleType
from typing import Any

_VARIABLE = "PDCLUSTER_NIXL_POLL_US"
_MODULES = ("nixl._api", "nixl_cu13._api", "nixl_cu12._api")
_LOG = logging.getLogger("pdcluster.nixl_poll")


def register() -> None:
    """Pin the delay in the installed NIXL; does nothing where the variable isn't set, never raises."""
    text = os.environ.get(_VARIABLE, "")
    if not text:
        return
    if not text.isdigit() or int(text) == 0:
        _LOG.warning("%s=%s is not a number of microseconds above 0; NIXL's progress thread will spin", _VARIABLE, text)
        return
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ImportError:
            continue
        if not pin_delay(module, int(text)):
            _LOG.warning("%s has no nixlBind.nixlAgentConfig; NIXL's progress thread will spin", name)
        return
    _LOG.warning("NIXL is not importable; %s has no effect", _VARIABLE)


def pin_delay(module: ModuleType, microseconds: int) -> bool:
    """Make agents configured through `module.nixlBind` poll at this interval; false where that can't be done."""
    binding = getattr(module, "nixlBind", None)
    base: Any = getattr(binding, "nixlAgentConfig", None)
    if not isinstance(base, type):
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
