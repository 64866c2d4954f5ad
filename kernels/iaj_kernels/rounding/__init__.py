"""Bounds on the rounding errors of a function's float32 results, derived from its primitives."""
