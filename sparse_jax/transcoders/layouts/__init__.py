"""Public layouts of transcoders: one module each, a table of names and what they mean.

tensors          files of tensors, strictly: every one is read, and none is left over
circuit_tracer   cross-layer transcoders and sets of per-layer ones
"""
