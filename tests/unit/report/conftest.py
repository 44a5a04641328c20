"""The commands, called in this process."""

from tests.unit.cli.conftest import invoke, root

__all__ = ["invoke", "root"]
