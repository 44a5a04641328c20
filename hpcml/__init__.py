"""hpcml: one recipe, any cluster, no lost work.

Importing this package costs nothing and needs only the standard library, because payloads import
it on compute nodes for :func:`report`.
"""

from hpcml.worker.metrics import report

__version__ = "0.1.0"
__all__ = ["__version__", "report"]
