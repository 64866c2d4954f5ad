"""The two layouts of circuit-tracer: cross-layer transcoders, and sets of per-layer ones.

Both have a config.yaml: model_kind, model_name, feature_input_hook, feature_output_hook, scan.

cross_layer_transcoder

    W_enc_<s>.safetensors     W_enc_<s> [F, D], b_enc_<s> [F], b_dec_<s> [D], threshold_<s> [F]
    W_dec_<s>.safetensors     W_dec_<s> [F, L - s, D]: axis 1 begins at the layer itself, and is
                              zero beyond the window

transcoder_set, with `activation: topk` and `k` in config.yaml where features are the k largest

    layer_<l>.safetensors     W_enc [F, D], W_dec [F, D], b_enc [F], b_dec [D],
                              activation_function.threshold [F] (JumpReLU), W_skip [D, D], k

b_dec belongs to the output of the layer, and W_skip has outputs as rows. Features without a
threshold are ReLU. TopK keeps the largest pre-activations, also those below 0.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from sparse_jax.transcoders.layouts import tensors as files
from sparse_jax.transcoders.layouts.layer import Layer
from sparse_jax.transcoders.transcoder import INPUTS, OUTPUTS, Transcoder, TranscoderConfig

CROSS_LAYER, PER_LAYER = "cross_layer_transcoder", "transcoder_set"
KINDS = (CROSS_LAYER, PER_LAYER)
# By field of config.yaml, the names that may be inputs and outputs of MLPs.
HOOK_FIELDS = {"feature_input_hook": INPUTS, "feature_output_hook": OUTPUTS}
_SITES = {
    "feature_input_hook": "input of each MLP after or before its norm",
    "feature_output_hook": "output of each MLP",
}
_ENCODER = ("W_enc", "b_enc", "b_dec", "threshold")
_THRESHOLD = "activation_function.threshold"


def hooks(file: Path, description: Mapping[str, Any]) -> tuple[str, str]:
    """What features read and write, by the names in config.yaml.

    Raises:
      BadInputError: they are no inputs or outputs of MLPs.
    """
    for field, known in HOOK_FIELDS.items():
        if description.get(field) not in known:
            *others, last = known
            raise BadInputError(
                f"{file}: {field} is {description.get(field)!r}, and a transcoder stands for MLPs "
                f"here; give one with {', '.join(others)} or {last}, the {_SITES[field]}"
            )
    return description["feature_input_hook"], description["feature_output_hook"]


def layers(folder: Path, description: Mapping[str, Any]) -> int:
    """The number of layers, by the names of files.

    Raises:
      CorruptError: there are none, or there are gaps.
    """
    start = "W_enc_" if description["model_kind"] == CROSS_LAYER else "layer_"
    names = (file.stem.removeprefix(start) for file in folder.glob(f"{start}*.safetensors"))
    numbers = sorted(int(name) for name in names if name.isdecimal())
    if not numbers or numbers != list(range(len(numbers))):
        raise CorruptError(f"{folder} has encoders of layers {numbers}; copy the whole folder")
    return len(numbers)


def cross_layer(
    folder: Path, L: int, cfg: TranscoderConfig | None, hooks: tuple[str, str]
) -> Transcoder:
    """A cross-layer transcoder.

    Args:
      folder: folder of its files.
      L: number of layers.
      cfg: configuration that is known; None for what the tensors say.
      hooks: names of inputs and outputs.

    Raises:
      BadInputError: a tensor has no part in a transcoder.
      CorruptError: one is missing, of another shape or not finite.
    """
    encoder_files = [folder / f"W_enc_{layer}.safetensors" for layer in range(L)]
    encoders = [files.read(file) for file in encoder_files]
    decoders = [files.read(folder / f"W_dec_{layer}.safetensors") for layer in range(L)]
    if cfg is None:
        try:
            features, hidden = encoders[0]["W_enc_0"].shape
            _, written, _ = decoders[0]["W_dec_0"].shape
        except (KeyError, ValueError) as error:
            raise CorruptError(f"{folder}: W_enc_0 or W_dec_0 is missing or misshapen") from error
        cfg = TranscoderConfig(
            L,
            hidden,
            features,
            kind="jumprelu" if "threshold_0" in encoders[0] else "relu",
            window=None if written == L else written,
        )
    D, F = cfg.hidden_size, cfg.features
    for layer, (file, tensors) in enumerate(zip(encoder_files, encoders, strict=True)):
        known = {f"{prefix}_{layer}" for prefix in _ENCODER[: 4 if cfg.has_thresholds else 3]}
        files.check_known(file, tensors, known, f"{cfg.kind} transcoder")

    def decoders_of(source: int) -> np.ndarray:
        file, name = folder / f"W_dec_{source}.safetensors", f"W_dec_{source}"
        later, written = cfg.num_layers - source, len(cfg.targets(source))
        # The first format, and others, leave out what is beyond the window.
        w_FSD = files.get(file, decoders[source], name, (F, later, D), (F, written, D), stored=True)
        if w_FSD[:, written:].any():
            raise CorruptError(
                f"{folder}: {name} writes beyond the window of {cfg.window} in transcoder.json; "
                "copy the whole folder"
            )
        return w_FSD

    by_source = [decoders_of(source) for source in range(L)]
    params = {
        "encoder": files.stacked(encoder_files, encoders, "W_enc_{layer}", (F, D), stored=True),
        "encoder_bias": files.stacked(encoder_files, encoders, "b_enc_{layer}", (F,)),
        "decoder": {
            f"to_{to}": jnp.asarray(np.stack([by_source[s][:, to - s] for s in cfg.sources(to)]))
            for to in range(L)
        },
        "decoder_bias": files.stacked(encoder_files, encoders, "b_dec_{layer}", (D,)),
    }
    if cfg.has_thresholds:
        params["threshold"] = files.stacked(encoder_files, encoders, "threshold_{layer}", (F,))
        files.check_thresholds(folder, params["threshold"])
    return Transcoder(params, cfg, hooks)


def set_layer(file: Path, k: int, hooks: tuple[str, str]) -> Layer:
    """A layer of a set.

    Args:
      file: file of the layer.
      k: number of open features of TopK; 0 for ReLU or JumpReLU.
      hooks: names of input and output.

    Raises:
      BadInputError: a tensor has no part in it.
      CorruptError: a tensor is missing or does not fit.
    """
    tensors = files.read(file)
    if "k" in tensors and not k:
        raise BadInputError(
            f"{file}: it has a tensor k, so that features are the k largest; write activation: "
            "topk and k: NUMBER into config.yaml"
        )
    has_thresholds = _THRESHOLD in tensors and not k
    known = {"W_enc", "W_dec", "b_enc", "b_dec", "W_skip"}
    known |= {_THRESHOLD} if has_thresholds else set()
    known |= {"k"} if k else set()
    kind = "topk" if k else "jumprelu" if has_thresholds else "relu"
    files.check_known(file, tensors, known, f"{kind} transcoder")
    if "k" in tensors and tensors["k"].reshape(-1).tolist() != [k]:
        raise CorruptError(
            f"{file}: k is {tensors['k'].tolist()}, and {k} in config.yaml; copy the whole folder"
        )
    shape = tensors["W_enc"].shape if "W_enc" in tensors else ()
    if len(shape) != 2:
        raise CorruptError(f"{file}: W_enc is missing or misshapen; copy the whole folder")
    F, D = shape
    if k > F:
        raise BadInputError(f"{file}: k is {k} in config.yaml, and there are {F} features")
    threshold_F = files.get(file, tensors, _THRESHOLD, (F,)) if has_thresholds else None
    if threshold_F is not None:
        files.check_thresholds(file, threshold_F)
    return Layer(
        source=file,
        encoder_FD=files.get(file, tensors, "W_enc", (F, D), stored=True),
        encoder_bias_F=files.get(file, tensors, "b_enc", (F,)),
        decoder_FWD=files.get(file, tensors, "W_dec", (F, D), stored=True)[:, None],
        decoder_bias_D=files.get(file, tensors, "b_dec", (D,)),
        threshold_F=threshold_F,
        skip_DD=files.get(file, tensors, "W_skip", (D, D)) if "W_skip" in tensors else None,
        k=k,
        rectified=not k,
        hooks=hooks,
    )


def open_features(folder: Path, description: Mapping[str, Any]) -> int:
    """The k of a set whose features are the k largest; 0 for others.

    Raises:
      BadInputError: an activation that is not known, or no k.
    """
    kind = description.get("activation", "relu")
    if kind not in ("jumprelu", "relu", "topk"):
        raise BadInputError(
            f"{folder / 'config.yaml'}: activation is {kind!r}; give a transcoder of topk, relu or "
            "jumprelu"
        )
    k = description.get("k")
    if kind == "topk" and (isinstance(k, bool) or not isinstance(k, int) or k < 1):
        raise BadInputError(
            f"{folder / 'config.yaml'}: k is {k!r}, and activation topk needs the number of "
            "features that are open at a token; write it there"
        )
    return k if kind == "topk" and isinstance(k, int) else 0
