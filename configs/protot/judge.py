"""Continuations of trained models, measured and compared by judges, after appendix B of the paper.

    iaj protot judge --config=protot/judge --run=runs/protot --run=runs/llama \\
        --judge=perplexity:smollm2
    iaj protot judge --config=protot/judge:smoke --run=runs/protot --run=runs/llama

The defaults: 100 test documents, prompts of 100 tokens and 50 new ones, and the sampler of the
released code. The paper names neither the number of prompts nor the decoding.
"""

from ml_collections import ConfigDict

from protot_jax.studies.judging import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.judging.settings.JudgingConfig`."""
    return STUDY.settings(mode)
