"""Cross-layer transcoders of CLT-Forge: a folder with clt_cfg.json and clt_weights.safetensors.

    W_enc [L, D, F], b_enc [L, F], log_threshold [L, F]
    W_dec [L (L + 1) / 2, F, D], b_dec [L (L + 1) / 2, D]      source and target, row by row of the
                                                               upper triangle
    estimated_norm_scaling_factor_in, _out [L]                 inputs and outputs were multiplied so

A feature is p where it is above exp(log_threshold). The bias of an output is the sum of those of
its sources. With `cross_layer_decoders: false` there are decoders of the own layer alone, W_dec
[L, F, D] and b_dec [L, D].
"""

from pathlib import Path

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import read_json
from sparse_jax.transcoders.layouts import tensors as files
from sparse_jax.transcoders.layouts.layer import Layer
from sparse_jax.transcoders.transcoder import BARE_INPUT, HOOKS

CONFIG, WEIGHTS = "clt_cfg.json", "clt_weights.safetensors"
_SCALES = ("estimated_norm_scaling_factor_in", "estimated_norm_scaling_factor_out")
# Buffers of training, which change no feature.
_UNREAD = {"feature_count", "layer_mask"}


def layers(folder: Path) -> tuple[list[Layer], int | None]:
    """The layers of a transcoder, and how many each feature writes into, None for all later ones.

    Raises:
      BadInputError: a tensor has no part in it.
      CorruptError: a tensor is missing or does not fit.
    """
    config, file = read_json(folder / CONFIG), folder / WEIGHTS
    config = config if isinstance(config, dict) else {}
    if (kind := config.get("activation_fn", "jumprelu")) != "jumprelu":
        raise BadInputError(f"{folder / CONFIG}: activation_fn is {kind!r}; give one of jumprelu")
    if not file.is_file() and any(folder.glob(f"rank*_{WEIGHTS}")):
        raise BadInputError(
            f"{folder} has a file for each process of its training; save it whole, as {WEIGHTS}"
        )
    tensors = files.read(file)
    names = {"W_enc", "b_enc", "W_dec", "b_dec", "log_threshold", *_SCALES}
    files.check_known(file, tensors, names | _UNREAD, "transcoder of CLT-Forge")
    shape = tensors["W_enc"].shape if "W_enc" in tensors else ()
    if len(shape) != 3:
        raise CorruptError(f"{file}: W_enc is missing or misshapen; copy the whole folder")
    L, D, F = shape
    own = config.get("cross_layer_decoders", True) is False
    pairs = L if own else L * (L + 1) // 2
    encoder_LDF = files.get(file, tensors, "W_enc", (L, D, F))
    bias_LF = files.get(file, tensors, "b_enc", (L, F))
    theta_LF = np.exp(files.get(file, tensors, "log_threshold", (L, F)))
    decoder_PFD = files.get(file, tensors, "W_dec", (pairs, F, D))
    bias_PD = files.get(file, tensors, "b_dec", (pairs, D))
    scale_in_L, scale_out_L = (files.get(file, tensors, name, (L,)) for name in _SCALES)
    source_P, target_P = (np.arange(L),) * 2 if own else np.triu_indices(L)
    model = str(config.get("model_name") or "")
    found = []
    for layer in range(L):
        is_own_P, is_target_P = source_P == layer, target_P == layer
        decoder_WFD = decoder_PFD[is_own_P] / scale_out_L[target_P[is_own_P], None, None]
        found.append(
            Layer(
                source=file,
                encoder_FD=np.ascontiguousarray(encoder_LDF[layer].T) * scale_in_L[layer],
                encoder_bias_F=bias_LF[layer],
                decoder_FWD=decoder_WFD.swapaxes(0, 1),
                decoder_bias_D=bias_PD[is_target_P].sum(0) / scale_out_L[layer],
                threshold_F=theta_LF[layer],
                hooks=(BARE_INPUT, HOOKS[1]),
                model_name=model,
            )
        )
    return found, 1 if own else None
