"""Cross-layer transcoders: sparse features that stand for the MLPs of a model.

transcoder     parameters, encoder and decoder; `init`
activations    ReLU, JumpReLU, TopK, BatchTopK
inputs         inputs and outputs of a model's MLPs, scaled, without outliers
objective      the loss, for the shared training loop
files          folders in public layouts; `save`, `load`
fit            how much of MLP outputs a transcoder leaves out
autoencoders   features of one place, to read and to steer by; `load_autoencoder`
"""

from sparse_jax.transcoders.autoencoders import Autoencoder, load_autoencoder
from sparse_jax.transcoders.files import Origin, load, save
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig, init

__all__ = [
    "Autoencoder",
    "Origin",
    "Transcoder",
    "TranscoderConfig",
    "init",
    "load",
    "load_autoencoder",
    "save",
]
