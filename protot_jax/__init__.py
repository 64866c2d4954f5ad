"""Prototype Transformer: language models whose token mixer is R readable, editable prototypes.

After "Prototype Transformer: Towards Language Model Architectures Interpretable by Design".

    mixers      prototype channels, their edits, and the recurrences they are compared with
    training    pretraining, ablation studies and search, saved runs, exports
    analysis    generation and steering
    studies     commands: concepts, scores, interventions, attribution, perturbations, robustness,
                judging, recall, GLUE
"""

from lm_jax.run.moved import keep_names
from protot_jax.mixers.deltanet import DeltaNetMixer
from protot_jax.mixers.edits import edit, reinitialise
from protot_jax.mixers.gated_deltanet import GatedDeltaNetMixer
from protot_jax.mixers.mamba import MambaMixer
from protot_jax.mixers.models import build_model
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.mixers.slots import GatedSlotMixer, RavenMixer
from protot_jax.studies.attribution import attribute
from protot_jax.training.saved_run import TrainedModel, load_run

keep_names(
    "protot_jax",
    {
        "mixers": "routing frozen rotary convolution mamba deltanet gated_deltanet slots models "
        "reference_code edits",
        "training": "config pretrain study_config search_space router routing_loss "
        "export exported saved_run subset count seeds results diverged run_options",
        "analysis": "token_ids steering generate",
        "studies": "concepts attribution interventions robustness glue judging recall",
    },
    {
        "mixer": "mixers.prototypes",
        "prototypes": "mixers.config",
        "search": "studies.search",
        "study": "studies.ablations",
        "training.search": "studies.search",
        "training.study": "studies.ablations",
        "concepts.compare_scores": "studies.scores",
        "studies.concepts.compare_scores": "studies.scores",
        "robustness.benchmark": "studies.perturbations",
        "robustness.backfill": "studies.perturbations.backfill",
        "robustness.screening": "studies.perturbations.screening",
        "studies.robustness.benchmark": "studies.perturbations",
        "studies.robustness.backfill": "studies.perturbations.backfill",
        "studies.robustness.screening": "studies.perturbations.screening",
    },
)

__all__ = [
    "DeltaNetMixer",
    "GatedDeltaNetMixer",
    "GatedSlotMixer",
    "MambaMixer",
    "PrototypeMixer",
    "RavenMixer",
    "TrainedModel",
    "attribute",
    "build_model",
    "edit",
    "load_run",
    "reinitialise",
]
