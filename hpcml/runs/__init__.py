"""The run folder: creating it, and reading states, metrics and results from it."""
