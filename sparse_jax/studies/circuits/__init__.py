"""The command that finds the circuits of a task, in dense and sparse models."""
