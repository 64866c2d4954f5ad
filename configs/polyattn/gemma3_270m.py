"""The audit of Gemma-3-270M (base), real weights from the manifest.

    iaj polyattn audit --config=polyattn/gemma3_270m --workdir=runs/gemma3_270m

Fetching the weights shows the Gemma Terms first. Of its 18 layers 15 see a window of 512 keys: at
1024 tokens the rows of local and of global layers differ, and `rows.parquet` holds each row's
window. Modes: `:quickstart` and `:smoke`, as for SmolLM2; the vocabulary of 262,144 makes it about
twice as slow. Softmax should find the needle in about 9, 7 and 9 of 10 prompts of 256, 512 and 1024
tokens, in none without it, and its loss on repeated tokens should fall from about 13.6 to 0.45.
"""

from ml_collections import ConfigDict

from polyattn_jax.audit.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return experiment(
        mode,
        "gemma3_270m",
        batch_size=2,
        niah_lengths=(256, 512, 1024),
        induction_length=1024,
        mqar_length=1024,
        sweep_length=512,
    )
