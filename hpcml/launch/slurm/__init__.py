"""Slurm: submitting arrays, and asking in one call each what became of them."""
