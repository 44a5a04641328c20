"""``python -m hpcml``: the same as the command ``hpcml``."""

from hpcml.cli import main

main()
