"""The tests' hub server, under the name by which scripts outside of the tests import it."""

from support.hub_server import hub_server

__all__ = ["hub_server"]
