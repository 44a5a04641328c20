"""Corpora as memory-mapped token files, and the order in which a training reads them."""
