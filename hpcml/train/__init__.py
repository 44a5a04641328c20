"""The training payload: what ``python -m hpcml.train`` does with the cell that it finds."""
