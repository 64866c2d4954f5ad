"""The audit of SmolLM2-135M-Instruct, with the settings of `polyattn/smollm2`: the default.

    iaj polyattn audit --config=polyattn/audit --workdir=runs/audit

Modes: `:quickstart` and `:smoke`, as there.
"""

from ml_collections import ConfigDict

from lm_jax.console.config_files import load_config


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `polyattn_jax.audit.config.AuditConfig`."""
    return load_config(f"polyattn/smollm2:{mode}" if mode else "polyattn/smollm2")
