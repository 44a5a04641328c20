"""Giving a submission to a scheduler: submitit executors that run hpcml's own script."""
