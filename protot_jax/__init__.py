"""Prototype Transformer: language models whose token mixer is R readable, editable prototypes.

After "Prototype Transformer: Towards Language Model Architectures Interpretable by Design".
"""

from protot_jax.attribution import attribute
from protot_jax.deltanet import DeltaNetMixer
from protot_jax.edits import edit, reinitialise
from protot_jax.gated_deltanet import GatedDeltaNetMixer
from protot_jax.mamba import MambaMixer
from protot_jax.mixer import PrototypeMixer
from protot_jax.models import build_model
from protot_jax.saved_run import TrainedModel, load_run
from protot_jax.slots import GatedSlotMixer, RavenMixer

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
