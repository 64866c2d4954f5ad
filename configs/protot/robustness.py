"""Robustness of trained models to perturbed sentences, after section 5.2 and appendix A.5.

    iaj protot robustness --config=protot/robustness --run=runs/protot --run=runs/llama
    iaj protot robustness --config=protot/robustness:smoke --run=runs/speeches

The defaults: 100 pairs of a slice, where the paper has 500, of the validation text of the first
run, and every slice whose data are there.
"""

from ml_collections import ConfigDict

from protot_jax.studies.robustness import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.robustness.settings.RobustnessConfig`."""
    return STUDY.settings(mode)
