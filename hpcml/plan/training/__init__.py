"""What a training will need, before anything is submitted: memory, time, layouts, checkpoints."""
