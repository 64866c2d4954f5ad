"""A small ProtoT on the speeches of US presidents: minutes on two CPU cores.

    iaj protot pretrain --config=protot/quickstart --workdir=runs/speeches

It should reach a validation perplexity at least 2.5 times below that of the unigram model. Every
row is the beginning of a document of some 340 tokens, as `protot_jax.studies.concepts` reads them.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from protot_jax.mixers.config import Prototypes
from protot_jax.training.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.config.PretrainConfig`."""
    return experiment(
        mode,
        hidden_size=128,
        num_layers=4,
        context=128,
        prototypes=Prototypes(num_prototypes=16),
        corpus=CorpusConfig(vocab_size=4_000, words=300),
        validation_documents=150,
        batch_size=16,
        epochs=2,
        max_steps=300,
        learning_rate=4e-3,
        dropout=0.0,
        dtype="float32",
        eval_every=150,
        early_stop=False,
        seeds=(234,),
    )
