"""SmolLM2-135M in minutes, as an example of the report.

    iaj sparse posttrain --config=sparse/quickstart --workdir=runs/sparse_quickstart

Eighty updates on 17,000 tokens of Wikipedia, some minutes on two cores. The result depends on the
processor and the number of threads too.
"""

from ml_collections import ConfigDict

from lm_jax.model.lora import LoraConfig
from lm_jax.text.preparation import CorpusConfig
from sparse_jax.gates.geco import Strength
from sparse_jax.studies.posttrain import STUDY
from sparse_jax.studies.posttrain.settings import OPEN_GATES


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `sparse_jax.studies.posttrain.settings.PosttrainConfig`."""
    return STUDY.settings(
        mode,
        corpus=CorpusConfig("wiki", "document", splits=(0.95, 0.05, 0.0), max_tokens=100_000),
        validation_documents=25,
        strength=Strength(dual_rate=0.1, decay=0.8, start=0.3),
        adapters=LoraConfig(rank=8, alpha=16.0),
        distill=0.0,
        batch_size=4,
        **OPEN_GATES,
        steps=80,
        learning_rate=1e-3,
        eval_every=20,
        save_every=40,
    )
