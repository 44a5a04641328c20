"""The batch inference payload: what ``python -m hpcml.infer`` does with the cell that it finds."""
