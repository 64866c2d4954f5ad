"""Circuits of dense and sparse models: tasks, metrics."""
