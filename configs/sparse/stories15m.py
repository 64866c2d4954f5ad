"""A Llama of 15 million parameters made sparse on text that it samples itself, on two CPU cores.

    iaj sparse posttrain --config=sparse/stories15m --workdir=runs/stories15m

On its own samples the pretrained model is at its optimum: training cannot teach it the text, and
the divergence from it is all that a sparse model loses.
"""

import dataclasses

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import ON_DIVERGENCE


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    settings = {
        **ON_DIVERGENCE,
        "model": "stories15m",
        "corpus": CorpusConfig(
            "samples:stories15m", "document", splits=(0.96, 0.04, 0.0), max_tokens=1_200_000
        ),
        "context": 255,
        "validation_documents": 120,
        "raw_gate": True,
        "open_at_start": 0.92,
        "opened": "weight",
        "bias_rate": 60.0,
        "relaxed": 0.05,
        "strength": dataclasses.replace(ON_DIVERGENCE["strength"], dual_rate=3.0),
        "loss_share": 0.5,
        "by_rule": 0.3,
        "batch_size": 4,
        "steps": 4_000,
        "learning_rate": 5e-4,
        "eval_every": 500,
        "save_every": 250,
        "texts": ("Once upon a time, Lily gave a red ball to Tom. Tom thanked Lily.",),
    }
    return STUDY.settings(mode, **settings)
