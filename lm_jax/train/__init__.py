"""Training: objective, optimizer, step, loop, metrics, profiling."""
