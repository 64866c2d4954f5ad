"""Several devices: the mesh, how parameters are sharded, kernels under `jax.shard_map`."""
