"""Shared by all operations: dispatch, tuned tiles, shape checks, noise and test cases."""
