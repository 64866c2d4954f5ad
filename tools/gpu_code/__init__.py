"""The code that our kernels become on a GPU, read on a machine that has none."""
