"""The audit of SmolLM2-135M-Instruct, real weights from the manifest.

    iaj polyattn audit --config=polyattn/smollm2 --workdir=runs/smollm2

Modes: `:quickstart` ends within minutes on two CPU cores, `:smoke` within one; in full it takes
hours.
"""

from ml_collections import ConfigDict

from polyattn_jax.audit.config import experiment


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return experiment(
        mode,
        "smollm2",
        batch_size=2,
        niah_lengths=(256, 512, 1024),
        induction_length=1024,
        mqar_length=1024,
        sweep_length=512,
    )
