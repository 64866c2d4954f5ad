"""Prototype Transformer: language models whose token mixer is R readable, editable prototypes.

After "Prototype Transformer: Towards Language Model Architectures Interpretable by Design".

    mixers      prototype channels, their edits, and the recurrences they are compared with
    training    pretraining, ablation studies and search, saved runs, exports
    analysis    generation and steering
    studies     commands: concepts, interventions, attribution, robustness, judging, recall, GLUE
"""

from protot_jax.mixers.deltanet import DeltaNetMixer
from protot_jax.mixers.edits import edit, reinitialise
from protot_jax.mixers.gated_deltanet import GatedDeltaNetMixer
from protot_jax.mixers.mamba import MambaMixer
from protot_jax.mixers.models import build_model
from protot_jax.mixers.prototypes import PrototypeMixer
from protot_jax.mixers.slots import GatedSlotMixer, RavenMixer
from protot_jax.studies.attribution import attribute
from protot_jax.training.saved_run import TrainedModel, load_run

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
