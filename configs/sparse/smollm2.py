"""SmolLM2-135M with adapters: most of its attention edges closed, on two CPU cores in an hour.

    python -m sparse_jax.posttrain --config=configs/sparse/smollm2.py --workdir=runs/sparse

To reach: at most 20 % of edges open, within 0.05 nats per token of the dense model on the same
text (introductions of Wikipedia articles). Half of the hour goes to the control, the same training
with every gate open; `--config.nocontrol` leaves it out. `smollm2_256.py` has the longer context.
"""

from ml_collections import ConfigDict

from lm_jax.train.prepare import CorpusSettings
from sparse_jax.config import SMALL_MODEL, experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.config.PosttrainConfig`."""
    return experiment(
        mode,
        **SMALL_MODEL,
        corpus=CorpusSettings("wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=600_000),
        validation_documents=120,
        control=True,
    )
