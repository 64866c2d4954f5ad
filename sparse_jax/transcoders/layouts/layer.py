"""One layer of a transcoder as a file holds it, brought to one form; layers put together."""

from collections.abc import Sequence
import dataclasses
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError
from sparse_jax.transcoders.transcoder import (
    HOOKS,
    INPUTS,
    OUTPUTS,
    Transcoder,
    TranscoderConfig,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layer:
    """The features that read one layer; float32, and bfloat16 of matrices that are stored so.

    Attributes:
      source: file or folder that it was read from, for errors.
      encoder_FD, encoder_bias_F: encoders and their biases, of inputs that nothing is taken from.
      decoder_FWD: decoders of the W layers from the own one on.
      decoder_bias_D: bias of the output of this layer.
      threshold_F: thresholds of JumpReLU; None for none.
      skip_DD: W_skip, outputs by inputs; None for none.
      k: number of open features, of TopK; 0 for others.
      rectified: whether TopK leaves out what is below 0.
      hooks: names of input and output.
      model_name: name of the model.
    """

    source: Path
    encoder_FD: np.ndarray
    encoder_bias_F: np.ndarray
    decoder_FWD: np.ndarray
    decoder_bias_D: np.ndarray
    threshold_F: np.ndarray | None = None
    skip_DD: np.ndarray | None = None
    k: int = 0
    rectified: bool = True
    hooks: tuple[str, str] = HOOKS
    model_name: str = ""

    @property
    def form(self) -> dict[str, object]:
        """What all layers of a transcoder have alike, by name."""
        features, hidden = self.encoder_FD.shape
        return {
            "number of features": features,
            "width": hidden,
            "array of thresholds": "missing" if self.threshold_F is None else "there",
            "W_skip": "missing" if self.skip_DD is None else "there",
            "k": self.k,
            "rule of TopK": "without negative ones" if self.rectified else "with negative ones",
            "input hook": self.hooks[0],
            "output hook": self.hooks[1],
        }


def joined(layers: Sequence[Layer], *, window: int | None) -> tuple[Transcoder, str]:
    """The transcoder of all layers, and the name of its model.

    Args:
      layers: layers from the first on.
      window: the number of layers that a feature writes into, None for all later ones.

    Raises:
      BadInputError: layers differ in what they hold.
    """
    first = layers[0]
    for hook, known in zip(first.hooks, (INPUTS, OUTPUTS), strict=True):
        if hook not in known:
            raise BadInputError(
                f"{first.source}: {hook!r} is no input or output of an MLP here; give one with "
                f"{', '.join(known)}"
            )
    for layer in layers[1:]:
        for name, here in layer.form.items():
            if here != first.form[name]:
                raise BadInputError(
                    f"{layer.source}: the {name} is {here}, and that of {first.source} "
                    f"{first.form[name]}; a graph needs layers that are alike"
                )
    features, hidden = first.encoder_FD.shape
    kind = "relu" if first.threshold_F is None else "jumprelu"
    cfg = TranscoderConfig(
        len(layers),
        hidden,
        features,
        kind="topk" if first.k else kind,
        window=window,
        k=first.k,
        rectified=first.rectified,
    )
    params = {
        "encoder": jnp.stack([layer.encoder_FD for layer in layers]),
        "encoder_bias": jnp.stack([layer.encoder_bias_F for layer in layers]),
        "decoder": {
            f"to_{to}": jnp.stack([layers[s].decoder_FWD[:, to - s] for s in cfg.sources(to)])
            for to in range(len(layers))
        },
        "decoder_bias": jnp.stack([layer.decoder_bias_D for layer in layers]),
    }
    optional = {
        "threshold": [each.threshold_F for each in layers if each.threshold_F is not None],
        "skip": [each.skip_DD for each in layers if each.skip_DD is not None],
    }
    params |= {name: jnp.stack(arrays) for name, arrays in optional.items() if arrays}
    return Transcoder(params, cfg, first.hooks), first.model_name
