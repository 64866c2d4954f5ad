"""ProtoT as the paper trains it, on introductions of Wikipedia articles in place of FineWeb-Edu.

    iaj protot pretrain --config=protot/default --workdir=runs/protot

The settings of the column "default" of Table 1: 18,000 examples, the first 256 tokens of a document
each, for ten epochs at most. Half of the introductions have fewer than 150 tokens, so that an epoch
has fewer than the paper's 4.6 M. There the paper's ProtoT reaches a test perplexity of 90.5 on
FineWeb-Edu; on another corpus the number is another. `iaj fetch wiki` brings the text.
Modes `:llama`, `:mamba` and `:deltanet` train a baseline at its learning rate (appendix A.2): 78.7,
86.0 and 90.4.
"""

from ml_collections import ConfigDict

from protot_jax.training.config import experiment
from protot_jax.training.study_config import PAPER_PROTOCOL

RATES = {"llama": 1.6e-3, "mamba": 3.8e-3, "deltanet": 6.8e-3}


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.config.PretrainConfig`."""
    return experiment(mode, rates=RATES, **PAPER_PROTOCOL)
