"""How a request is split over prefill and decode, by connector; the table of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from proxy.connectors.base import Connector
from proxy.connectors.nixl import NixlConnector

CONNECTORS: Mapping[str, Callable[[], Connector]] = {"nixl": NixlConnector}
