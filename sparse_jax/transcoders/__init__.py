"""Cross-layer transcoders: sparse features that stand for the MLPs of a model.

transcoder     parameters, encoder and decoder; `init`
activations    ReLU, JumpReLU, BatchTopK
inputs         inputs and outputs of a model's MLPs, scaled, without outliers
objective      the loss, for the shared training loop
files          folders in circuit-tracer's layout; `save`, `load`
"""

from sparse_jax.transcoders.files import Origin, load, save
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig, init

__all__ = ["Origin", "Transcoder", "TranscoderConfig", "init", "load", "save"]
