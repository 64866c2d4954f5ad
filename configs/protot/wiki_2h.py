"""ProtoT of the paper's size on introductions of Wikipedia articles: hours on a laptop.

    iaj protot pretrain --config=protot/wiki_2h --workdir=runs/wiki_2h

Half the paper's vocabulary and one seed.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from protot_jax.training.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.config.PretrainConfig`."""
    return experiment(
        mode,
        corpus=CorpusConfig(source="wiki", unit="document", vocab_size=8_000),
        # An introduction fills half a row, so they are joined, and the state runs on through them.
        examples="join",
        validation_documents=200,
        test_documents=200,
        batch_size=16,
        epochs=3,
        max_steps=1_600,
        dtype="float32",
        eval_every=200,
        early_stop=False,
        seeds=(234,),
    )
