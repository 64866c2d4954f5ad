"""Recall of ProtoT, its baselines and newer relatives with equal memory, by length and pairs.

    iaj protot recall --config=protot/recall:quickstart --workdir=runs/recall_quickstart
    iaj protot recall --config=protot/recall:small --workdir=runs/recall_small
    iaj protot recall --config=protot/recall --workdir=runs/recall

4,096 floats of memory in every layer, as the paper's ProtoT has; attention has 256 for each token.
The paper reports no recall. The suite at this size was not run to its end: each model is trained 18
times for 5,000 updates (tasks, rates, seeds). `quickstart` trains three models once each on short
sequences of MQAR, with 1,024 floats; `small` all models on all tasks at that size.
"""

from ml_collections import ConfigDict

from protot_jax.studies.recall import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.recall.settings.RecallConfig`."""
    return STUDY.settings(mode)
