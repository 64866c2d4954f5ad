"""ProtoT as the paper trains it: the config `protot/default` under the name of its command.

    iaj protot pretrain --workdir=runs/protot
    iaj protot pretrain --config=protot/pretrain:smoke --workdir=runs/protot_smoke

Modes as there: `:llama`, `:mamba` and `:deltanet` train a baseline, `:smoke` runs in seconds.
"""

from ml_collections import ConfigDict

from lm_jax.console.config_files import load_config


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.training.config.PretrainConfig`."""
    return load_config(f"protot/default:{mode}" if mode else "protot/default")
