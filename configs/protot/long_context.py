"""Table 1 of the Prototype Transformer's paper: four models at four contexts.

    iaj protot study --config=protot/long_context --workdir=runs/contexts

The released configuration of this study has no learning rate schedule while the others do; all of
ours have one. `--config.base.arithmetic=released` trains ProtoT with the released prefix mean.
"""

from ml_collections import ConfigDict

from lm_jax.text.preparation import CorpusConfig
from protot_jax.study_config import Variant, study

CONTEXTS = (256, 512, 1024, 2048)
# Test perplexity by context; the learning rates are the best of the paper's search.
PAPER = {
    "protot": (2.0e-3, (90.5, 84.8, 80.5, 81.9)),
    "llama": (1.6e-3, (78.7, 70.4, 65.3, 63.6)),
    "mamba": (3.8e-3, (86.0, 78.0, 70.5, 69.5)),
    "deltanet": (6.8e-3, (90.4, 76.3, 70.6, 68.9)),
}


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.study_config.StudyConfig`."""
    variants = (
        Variant(
            f"{model}_{context}",
            (f"model={model}", f"learning_rate={rate}", f"context={context}"),
            paper=perplexity,
        )
        for model, (rate, perplexities) in PAPER.items()
        for context, perplexity in zip(CONTEXTS, perplexities, strict=True)
    )
    # Parts of a speech long enough to fill the longest context.
    return study(
        mode,
        *variants,
        table="Table 1",
        train_documents=18_000,
        validation_documents=4_000,
        paper_split="test",
        corpus=CorpusConfig(words=2_500),
    )
