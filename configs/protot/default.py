"""ProtoT as the paper trains it, on the embedded corpus in place of FineWeb-Edu.

    python -m protot_jax.pretrain --config=configs/protot/default.py --workdir=runs/protot

The paper reaches a perplexity of 90.5 on 12.5 M tokens of FineWeb-Edu after ten epochs of 235 M
tokens (Table 1, context 256); on another corpus the number is another. `--config.model=llama` with
`--config.learning_rate=1.6e-3` (mamba 3.8e-3, deltanet 6.8e-3) trains a baseline.
"""

from ml_collections import ConfigDict

from protot_jax.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.config.PretrainConfig`."""
    return experiment(mode)
