"""Bounds on what rounding makes of a function's float32 results, derived from its primitives."""
