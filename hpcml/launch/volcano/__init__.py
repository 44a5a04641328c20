"""Volcano on Kubernetes: submitting jobs, and asking the server what became of them."""
