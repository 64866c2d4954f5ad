"""Table 20 of the Prototype Transformer's paper: dropout, in every model.

iaj protot study --config=protot/dropout --workdir=runs/dropout
"""

from ml_collections import ConfigDict

from protot_jax.training.study_config import PAPER_PROTOCOL, Variant, study

RATES = {
    "protot": (1e-3, 2e-3, 3e-3),
    "llama": (0.8e-3, 1.6e-3, 3.2e-3),
    "mamba": (1.9e-3, 3.8e-3, 7.6e-3),
    "deltanet": (3.4e-3, 6.8e-3, 13.6e-3),
}
NONE, NOT_IN_ATTENTION = "dropout=0.0", "attention_dropout=false"
# Model, what differs, perplexity in the paper.
ROWS = (
    ("protot", (), 97.1),
    ("protot", (NONE,), 107.6),
    ("llama", (), 84.8),
    ("llama", (NOT_IN_ATTENTION,), 85.2),
    ("llama", (NONE,), 92.4),
    ("mamba", (), 91.1),
    ("mamba", (NONE,), 96.6),
    ("deltanet", (), 99.4),
    ("deltanet", (NONE,), 103.5),
)
NAMES = {(): "default", (NONE,): "none", (NOT_IN_ATTENTION,): "not_in_attention"}


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.study_config.StudyConfig`."""
    variants = (
        Variant(f"{model}_{NAMES[changes]}", (f"model={model}", *changes), RATES[model], perplexity)
        for model, changes, perplexity in ROWS
    )
    return study(
        mode,
        *variants,
        table="Table 20",
        **PAPER_PROTOCOL,
    )
