"""The path by which a transcoder writes the results of the second hop.

What features add to result o where it is 1 is split, in absolute values, into

    merged     by features of the first MLP: one hop from the bits
    from bits  by features of the second MLP, as far as they read bits
    two hops   by features of the second MLP, as far as they read ANDs of pairs

and the three shares sum to 1. The model itself has 1 for two hops.
"""

import jax.numpy as jnp
import numpy as np

from lm_jax.model.precision import with_exact_products
from sparse_jax.studies.two_hop.results import Paths
from sparse_jax.transcoders.transcoder import Transcoder
from sparse_jax.transcoders.two_hop_model import TwoHopModel


@with_exact_products
def paths(transcoder: Transcoder, model: TwoHopModel, probability: float) -> Paths:
    """The shares of the three paths over all inputs, each with its probability.

    Args:
      transcoder: transcoder of the unscaled activations.
      model: what it was trained on.
      probability: probability that a bit is 1.
    """
    bits_XB = model.every_input()
    ones_X = bits_XB.sum(1)
    weight_X = probability**ones_X * (1 - probability) ** (bits_XB.shape[1] - ones_X)
    acts = model.activations(jnp.asarray(bits_XB))
    z_LXF = np.asarray(transcoder.encode(acts.input_LXD), np.float64)
    input_XD = np.asarray(acts.input_LXD[1], np.float64)
    encoder_FD = np.asarray(transcoder.params["encoder"][1], np.float64)
    is_one_XJ = np.asarray(acts.output_LXD[1], np.float64)[:, model.outputs]

    def written(source: int) -> np.ndarray:
        """Sum over results that are 1 of what each feature adds to them, `[X, F]`."""
        if source not in transcoder.cfg.sources(1):
            return np.zeros(z_LXF[source].shape)
        decoder_FJ = np.asarray(transcoder.decoder(source, 1), np.float64)[:, model.outputs]
        return np.abs(z_LXF[source]) * (is_one_XJ @ np.abs(decoder_FJ).T)

    def read(at: slice) -> np.ndarray:
        """Sum of absolute parts of pre-activations that these dimensions give, `[X, F]`."""
        return np.abs(input_XD[:, at]) @ np.abs(encoder_FD[:, at]).T

    bits_XF, pairs_XF = read(model.bits), read(model.pairs)
    share_XF = pairs_XF / np.maximum(bits_XF + pairs_XF, np.finfo(np.float64).tiny)
    second_XF = written(1)
    parts = np.array(
        [
            weight_X @ written(0).sum(1),
            weight_X @ (second_XF * (1 - share_XF)).sum(1),
            weight_X @ (second_XF * share_XF).sum(1),
        ]
    )
    total = parts.sum()
    shares = parts / total if total > 0 else np.zeros(3)
    error_LX, spread_LX = _squares(transcoder, z_LXF, np.asarray(acts.output_LXD), weight_X)
    return Paths(
        *map(float, shares),
        l0=float(weight_X @ (z_LXF > 0).sum((0, 2))),
        unexplained=float((error_LX @ weight_X).sum() / (spread_LX @ weight_X).sum()),
        unexplained_result=float(error_LX[1] @ weight_X / (spread_LX[1] @ weight_X)),
    )


def _squares(
    transcoder: Transcoder, z_LXF: np.ndarray, output_LXD: np.ndarray, weight_X: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Squared errors and squared distances from the mean, `[L, X]`."""
    decoded_LXD = np.asarray(transcoder.decode(jnp.asarray(z_LXF, jnp.float32)))
    mean_L1D = np.einsum("X,LXD->LD", weight_X, output_LXD)[:, None]
    return (
        ((decoded_LXD - output_LXD) ** 2).sum(2),
        ((output_LXD - mean_L1D) ** 2).sum(2),
    )
