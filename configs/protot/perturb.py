"""The perturbation and the intervention benchmark, after appendix A.5 of the paper.

    iaj protot perturb --config=protot/perturb --wordnet=FOLDER --workdir=runs/benchmark
    iaj protot perturb --config=protot/perturb:smoke --workdir=runs/perturb_smoke
    iaj protot perturb --config=protot/perturb:wikitext2 --workdir=runs/wikitext2

The defaults: the paper's seven slices and 500 pairs of each, from Wikipedia and the speeches of US
presidents. The paper's corpora are WikiText-2, DailyDialog and AG News, of which the first can be
fetched (mode wikitext2) and the others are files of yours.
"""

from ml_collections import ConfigDict

from protot_jax.studies.perturbations import STUDY


def get_config(mode: str = "") -> ConfigDict:
    """The settings of `protot_jax.studies.perturbations.settings.PerturbationsConfig`."""
    return STUDY.settings(mode)
