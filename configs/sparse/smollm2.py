"""SmolLM2-135M with adapters: most of its attention edges closed, on two CPU cores in an hour.

    python -m sparse_jax.posttrain --config=configs/sparse/smollm2.py --workdir=runs/sparse

To reach: at most 20 % of edges open, within 0.05 nats per token of the dense model on the same
text (introductions of Wikipedia articles). `smollm2_256.py` has the longer context.
"""

from ml_collections import ConfigDict

from sparse_jax.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.config.PosttrainConfig`."""
    return experiment(mode)
