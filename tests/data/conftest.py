"""The fixtures of this folder."""

from tests.data.common import cache, clients, web

__all__ = ["cache", "clients", "web"]
