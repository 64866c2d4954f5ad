"""The last rows of Table 1 of the Prototype Transformer's paper: larger ProtoTs at four contexts.

    iaj protot study --config=protot/context_variants --workdir=runs/context_variants

The default model with width 512, with 12 layers or with 64 prototypes. The paper names no learning
rates of these; they are trained at that of the default model. Of the default corpus few documents
are longer than 256 tokens, as in `long_context`. Not run beyond its smoke mode.
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

CONTEXTS = (256, 512, 1024, 2048)
# Test perplexity by context.
PAPER = {
    "width_512": ("hidden_size=512", (97.2, 82.0, 73.7, 73.0)),
    "layers_12": ("num_layers=12", (109.6, 79.8, 74.6, 76.7)),
    "prototypes_64": ("prototypes.num_prototypes=64", (94.0, 83.2, 79.1, 80.5)),
}


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    variants = (
        Variant(f"{name}_{context}", (change, f"context={context}"), paper=perplexity)
        for name, (change, perplexities) in PAPER.items()
        for context, perplexity in zip(CONTEXTS, perplexities, strict=True)
    )
    return study(
        mode,
        *variants,
        table="Table 1",
        paper_split="test",
        **PAPER_PROTOCOL,
    )
