"""ProtoT of the paper's size on the speeches of US presidents: hours on a laptop.

    iaj protot pretrain --config=protot/sotu_2h --workdir=runs/sotu_2h

Half the paper's vocabulary and one seed: the corpus has 2.6 M tokens, and the paper's default model
trains on 4.6 M an epoch.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from protot_jax.training.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.config.PretrainConfig`."""
    return experiment(
        mode,
        # About as many tokens as the context holds.
        corpus=CorpusConfig(vocab_size=8_000, words=250),
        validation_documents=400,
        batch_size=16,
        epochs=3,
        max_steps=1_600,
        dtype="float32",
        eval_every=200,
        early_stop=False,
        seeds=(234,),
    )
