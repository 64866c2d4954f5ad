"""What benchmarks time in torch, beside programs of JAX."""
