"""The engine ``megatron``: megatron-core's model, optimizer, schedules and checkpoints."""
