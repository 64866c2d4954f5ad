"""SmolLM2-135M with adapters: most of its attention edges closed on two CPU cores.

    iaj sparse posttrain --config=sparse/smollm2 --workdir=runs/sparse

Result of one run: 3.30 % of edges open, 0.049 nats per token over the dense model's loss on the
same text (introductions of Wikipedia articles); docs/sparse.md has the details. It took 27 minutes,
and its control, the same training with every gate open, 30; `--noconfig.control` omits it.
`--config.seeds="(0, 1, 2)"` trains three seeds. `smollm2_256.py` has a longer context.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from sparse_jax.config import SMALL_MODEL, experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.config.PosttrainConfig`."""
    return experiment(
        mode,
        **SMALL_MODEL,
        corpus=CorpusConfig("wiki", "document", splits=(0.97, 0.03, 0.0), max_tokens=600_000),
        validation_documents=120,
        control=True,
    )
