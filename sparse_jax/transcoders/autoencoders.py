"""Sparse autoencoders of other programs: features of one place of a model, to read and to steer by.

An autoencoder reconstructs its own input, so that it stands for no MLP and has no graph. Its
features have activations on text, and directions for an edit of the site:

    sae = sparse_jax.transcoders.load_autoencoder(folder)
    activation_BTF = sae.activations(model, tokens_BT, valid_BT)
    steering = lm_jax.Add(5.0 * sae.decoder_FD[7][None, None])
    edits = {sae.site: lm_jax.OneLayer(sae.layer, steering)}

Folders are those of SAELens (`layouts.saelens`) with an architecture standard, jumprelu, topk or
gated, and of dictionary_learning (`layouts.dictionary_learning`). With p = x W_enc + b_enc and x
less b_dec where the settings say so, features are relu(p); relu(p) where p is above its threshold;
relu of the k largest p; and of a gated one

    relu(x (W_enc e^r_mag) + b_mag) where x W_enc + b_gate > 0
"""

import os
from pathlib import Path

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.transcoders.activations import topk
from sparse_jax.transcoders.files import resolve
from sparse_jax.transcoders.layouts import dictionary_learning as learned
from sparse_jax.transcoders.layouts import saelens
from sparse_jax.transcoders.layouts import tensors as files

# Our sites by the names of TransformerLens' hooks.
_SITES = {
    "hook_resid_pre": "resid_pre",
    "hook_resid_mid": "resid_mid",
    "hook_resid_post": "resid_post",
    "hook_attn_out": "attn.out",
    "hook_mlp_out": "mlp.out",
    "mlp.hook_in": "mlp.in",
}


@struct.dataclass
class Autoencoder:
    """Features of one place of a model, in float32.

    Attributes:
      encoder_FD, encoder_bias_F: encoders and biases of inputs from which nothing is subtracted.
      decoder_FD: what one unit of each feature adds to the reconstruction.
      decoder_bias_D: reconstruction without any feature.
      threshold_F: values above which features are open; 0 but for JumpReLU.
      gate_bias_F, magnitude_F: bias of the gate, and factor of the encoder behind it; None for all
        that is not gated.
      site: name of the place.
      layer: number of its block.
      k: number of open features, of TopK; 0 for others.
      model_name: name of the model.
    """

    encoder_FD: jax.Array
    encoder_bias_F: jax.Array
    decoder_FD: jax.Array
    decoder_bias_D: jax.Array
    threshold_F: jax.Array
    gate_bias_F: jax.Array | None
    magnitude_F: jax.Array | None
    site: str = struct.field(pytree_node=False)
    layer: int = struct.field(pytree_node=False)
    k: int = struct.field(pytree_node=False, default=0)
    model_name: str = struct.field(pytree_node=False, default="")

    def encode(self, x_XD: jax.Array) -> jax.Array:
        """Features `[X, F]` of inputs."""
        product_XF = jnp.einsum("XD,FD->XF", x_XD.astype(jnp.float32), self.encoder_FD)
        if self.gate_bias_F is not None and self.magnitude_F is not None:
            value_XF = product_XF * self.magnitude_F[None] + self.encoder_bias_F[None]
            is_open_XF = product_XF + self.gate_bias_F[None] > 0
            return jnp.where(is_open_XF, jax.nn.relu(value_XF), 0.0)
        value_XF = product_XF + self.encoder_bias_F[None]
        if self.k:
            return topk(value_XF, self.k, rectified=True)
        return jnp.where(value_XF > self.threshold_F[None], value_XF, 0.0)

    def decode(self, features_XF: jax.Array) -> jax.Array:
        """Reconstructions `[X, D]` of features."""
        return jnp.einsum("XF,FD->XD", features_XF, self.decoder_FD) + self.decoder_bias_D[None]

    def activations(
        self, model: CircuitModel, tokens_BT: np.ndarray, valid_BT: np.ndarray
    ) -> jax.Array:
        """Features `[B, T, F]` on text, 0 where a token is padding.

        Args:
          model: a dense or sparse model.
          tokens_BT: ids of the text.
          valid_BT: false where a token is padding.

        Raises:
          UsageError: the model has another width, or no such layer.
        """
        L, D = model.cfg.num_layers, model.cfg.hidden_size
        width = self.encoder_FD.shape[1]
        if width != D or self.layer >= L:
            raise UsageError(
                f"autoencoder: of layer {self.layer} and width {width}, and the model has {L} "
                f"layers of width {D}; give the model that it was trained on"
            )
        return _activations(model, self, tokens_BT, valid_BT)


@exact_jit
def _activations(
    model: CircuitModel, autoencoder: Autoencoder, tokens_BT: jax.Array, valid_BT: jax.Array
) -> jax.Array:
    site, layer = autoencoder.site, autoencoder.layer
    x_BTD = model.forward(tokens_BT, valid_BT, record={site: keep}).records[site][layer]
    feature_XF = autoencoder.encode(x_BTD.reshape(-1, x_BTD.shape[-1]))
    return jnp.where(valid_BT[:, :, None], feature_XF.reshape(*x_BTD.shape[:2], -1), 0.0)


def load_autoencoder(folder: str | os.PathLike[str]) -> Autoencoder:
    """Reads an autoencoder of SAELens or of dictionary_learning.

    Args:
      folder: folder with cfg.json and sae_weights.safetensors, or config.json and ae.safetensors;
        or a repository of the hub (`files.resolve`).

    Raises:
      BadInputError: it is none, or is of a place that is not read here.
      CorruptError: a file is damaged, or a tensor missing or of another shape.
    """
    folder = resolve(folder)
    if (folder / saelens.CONFIG).is_file():
        read, described = _of_saelens(folder)
        scales = described.scales
        centred = "center_writing_weights" in described.processing
    elif any((folder / name).is_file() for name in (learned.WEIGHTS, learned.PICKLE)):
        read, scales, centred = learned.read(folder), False, False
    else:
        raise BadInputError(
            f"{folder} has no {saelens.CONFIG} and no {learned.WEIGHTS}, so it is no autoencoder "
            "of SAELens or dictionary_learning"
        )
    encoder_FD, decoder_FD, bias_F = read.encoder_FD, read.decoder_FD, read.bias_F
    gate_bias_F, magnitude_F = read.gate_bias_F, read.magnitude_F
    if read.subtracts:
        # What the subtraction does to a product with an encoder, in float64.
        shift_F = encoder_FD @ read.decoder_bias_D.astype(np.float64)
        gate_bias_F = None if gate_bias_F is None else gate_bias_F - shift_F
        bias_F = bias_F - (shift_F if magnitude_F is None else magnitude_F * shift_F)
    if centred:
        # Of a stream less its mean a product is that of the encoder less its own.
        encoder_FD = encoder_FD - encoder_FD.mean(1, keepdims=True, dtype=np.float64)
    if scales:
        # Features are ranked times the norms of their decoders, by which they are divided again.
        norm_F = np.linalg.norm(decoder_FD.astype(np.float64), axis=1)
        encoder_FD, bias_F = encoder_FD * norm_F[:, None], bias_F * norm_F
        decoder_FD = decoder_FD / np.where(norm_F > 0, norm_F, 1.0)[:, None]

    def single(x: np.ndarray) -> jax.Array:
        return jnp.asarray(np.ascontiguousarray(x), jnp.float32)

    return Autoencoder(
        encoder_FD=single(encoder_FD),
        encoder_bias_F=single(bias_F),
        decoder_FD=single(decoder_FD),
        decoder_bias_D=single(read.decoder_bias_D),
        threshold_F=single(read.threshold_F),
        gate_bias_F=None if gate_bias_F is None else single(gate_bias_F),
        magnitude_F=None if magnitude_F is None else single(magnitude_F),
        site=read.site,
        layer=read.layer,
        k=read.k,
        model_name=read.model_name,
    )


def _of_saelens(folder: Path) -> tuple[learned.Read, saelens.Description]:
    """The arrays of SAELens, and the settings.

    Raises:
      BadInputError, CorruptError: as `load_autoencoder`.
    """
    described = saelens.describe(folder)
    if described.architecture in saelens.TRANSCODERS:
        raise BadInputError(
            f"{folder} holds a {described.architecture}; read it by sparse_jax.transcoders.load"
        )
    layer, hook = described.place
    if hook not in _SITES:
        raise BadInputError(
            f"{described.file}: the hook {hook!r} is not read here; give an autoencoder of "
            f"{', '.join(_SITES)}"
        )
    if described.processing and not _SITES[hook].startswith("resid"):
        raise BadInputError(
            f"{described.file}: it is of a model with {', '.join(described.processing)}, in which "
            f"{hook} holds something else than in the checkpoint; give one of the residual stream"
        )
    file, D, F = folder / saelens.WEIGHTS, described.inputs, described.features
    tensors = files.read(file)
    gated = described.architecture == "gated"
    known = {"W_enc", "W_dec", "b_dec"}
    known |= {"b_gate", "b_mag", "r_mag"} if gated else {"b_enc"}
    known |= {"threshold"} if described.architecture == "jumprelu" else set()
    files.check_known(file, tensors, known, f"{described.architecture} autoencoder")

    def get(name: str, *shape: int) -> np.ndarray:
        return files.get(file, tensors, name, shape)

    theta_F = np.zeros(F, np.float32)
    read = learned.Read(
        encoder_FD=get("W_enc", D, F).T,
        bias_F=get("b_mag" if gated else "b_enc", F),
        decoder_FD=get("W_dec", F, D),
        decoder_bias_D=get("b_dec", D),
        subtracts=described.subtracts,
        threshold_F=get("threshold", F).clip(0) if "threshold" in known else theta_F,
        gate_bias_F=get("b_gate", F) if gated else None,
        magnitude_F=np.exp(get("r_mag", F)) if gated else None,
        k=described.k,
        site=_SITES[hook],
        layer=layer,
        model_name=described.model_name,
    )
    return read, described
