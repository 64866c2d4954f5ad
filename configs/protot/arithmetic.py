"""A small ProtoT at two contexts, for the exact prefix mean and for the released arithmetic.

    iaj protot pretrain --config=protot/arithmetic --workdir=runs/exact

trains with the exact mean; `--config.arithmetic=released` with the other, and
`python -m tools.compare_arithmetic --workdir=runs/arithmetic` with both at both contexts, and
compares. Documents are long here, so that a long context is one text and not several.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from protot_jax.mixers.config import Prototypes
from protot_jax.training.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.config.PretrainConfig`."""
    return experiment(
        mode,
        hidden_size=64,
        num_layers=4,
        context=256,
        prototypes=Prototypes(num_prototypes=16),
        corpus=CorpusConfig(vocab_size=2_000, words=2_500),
        examples="join",
        validation_documents=40,
        test_documents=40,
        batch_size=16,
        epochs=4,
        max_steps=400,
        learning_rate=4e-3,
        dropout=0.0,
        dtype="float32",
        eval_every=200,
        early_stop=False,
        seeds=(234, 124),
    )
