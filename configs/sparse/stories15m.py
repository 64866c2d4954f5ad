"""A Llama of 15 million parameters made sparse on text that it samples itself, on two CPU cores.

    iaj sparse posttrain --config=sparse/stories15m --workdir=runs/stories15m

On its own samples the pretrained model is at its optimum: training cannot teach it the text, and
the divergence from it is all that a sparse model loses.
"""

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
            "samples:stories15m", "document", splits=(0.96, 0.04, 0.0), max_tokens=2_000_000
        ),
        "context": 255,
        "validation_documents": 100,
        "batch_size": 8,
        "steps": 1_000,
        "learning_rate": 1e-3,
        "eval_every": 200,
        "save_every": 100,
        "texts": (
            "Once upon a time, Lily gave a red ball to Tom. Tom was happy and thanked Lily.",
        ),
    }
    return STUDY.settings(mode, **settings)
