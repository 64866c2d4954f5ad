"""SmolLM2-135M with adapters: most of its attention edges closed, on two CPU cores in an hour.

    python -m sparse_jax.posttrain --config=configs/sparse/smollm2.py --workdir=runs/sparse

To reach: at most 20 % of edges open, within 0.05 nats per token of the dense model on the same
text (introductions of Wikipedia articles). `smollm2_256.py` has the longer context.
"""

from ml_collections import ConfigDict

from lm_jax.lora import LoraSettings
from lm_jax.train.prepare import CorpusSettings
from sparse_jax.config import experiment
from sparse_jax.geco import Strength


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.config.PosttrainConfig`."""
    return experiment(
        mode,
        corpus=CorpusSettings("wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=600_000),
        validation_documents=120,
        slacks=(0.04,),
        strength=Strength(dual_rate=0.1, decay=0.9, start=0.3),
        adapters=LoraSettings(rank=8, alpha=16.0),
        distill=0.0,
        control=True,
        batch_size=8,
        steps=400,
        learning_rate=1e-3,
        eval_every=80,
        save_every=40,
    )
