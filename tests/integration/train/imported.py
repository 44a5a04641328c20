"""What the ranks of a training import, so that a process forked from one that did need not."""

import os

import hpcml.train.fsdp
import hpcml.train.trainer

os.environ["DS_ACCELERATOR"] = "cpu"

import hpcml.train.deepspeed_engine  # noqa: F401
