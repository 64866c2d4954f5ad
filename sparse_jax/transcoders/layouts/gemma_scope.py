"""Gemma Scope 1 and 2: JumpReLU transcoders of Gemma 2 and Gemma 3.

Gemma Scope 1, `layer_<l>/width_<w>/average_l0_<n>/params.npz`

    W_enc [D, F], b_enc [F], W_dec [F, D], b_dec [D], threshold [F]

of the MLP's input before the weights of its norm. Gemma Scope 2,
`layer_<l>_width_<w>_l0_<size>/params.safetensors`

    w_enc [D, F], b_enc [F], w_dec [F, D], b_dec [D], threshold [F], affine_skip_connection [D, D]

of the MLP's input after the weights, with inputs as rows of the affine skip connection. Its
cross-layer transcoders are `params_layer_<l>.safetensors` with w_dec [F, L, D] of all target
layers, where those before the own layer are unused. b_dec is never subtracted from inputs, and
outputs are those after the norm that follows the MLP. The releases have autoencoders of other
places in files of the same names, which config.json beside the file tells apart, or the folder.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
import re

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import read_json
from sparse_jax.transcoders.layouts import tensors as files
from sparse_jax.transcoders.layouts.layer import Layer
from sparse_jax.transcoders.transcoder import BARE_INPUT, HOOKS

FIRST, SECOND = "params.npz", "params.safetensors"
CROSS_LAYER = re.compile(r"params_layer_(\d+)\.safetensors")
# The layer and the choices of a folder, in either release.
FOLDER = re.compile(r"layer_(\d+)(?:_width_\w+?_l0_\w+)?")
_SKIP = "affine_skip_connection"
# Of older autoencoders; ones in all that were released.
_SCALE = "scaling_factor"
# By field of config.json, how the module of a transcoder is called.
_POINTS = {
    "hf_hook_point_in": re.compile(r"model\.layers\.(\d+)\.pre_feedforward_layernorm\.output"),
    "hf_hook_point_out": re.compile(r"model\.layers\.(\d+)\.post_feedforward_layernorm\.output"),
}
# Parts of the paths of autoencoders, in both releases.
_AUTOENCODERS = re.compile(r"gemma-scope-.*-(res|mlp|att)|(resid_post|mlp_out|attn_out)(_all)?")


def check_place(file: Path) -> None:
    """Raises for an autoencoder, and for a transcoder of other modules.

    Raises:
      BadInputError: naming what says so.
    """
    for part in file.absolute().parts:
        if _AUTOENCODERS.fullmatch(part):
            raise BadInputError(
                f"{file}: {part} has autoencoders of Gemma Scope, which stand for no MLP; give a "
                "folder of transcoders"
            )
    settings = file.parent / "config.json"
    raw = read_json(settings) if settings.is_file() else {}
    for field, pattern in _POINTS.items() if isinstance(raw, dict) else ():
        if field in raw and not pattern.fullmatch(str(raw[field])):
            raise BadInputError(
                f"{settings}: {field} is {raw[field]!r}, and a transcoder stands for an MLP here; "
                "give one between the norms before and after it"
            )


def first_layer(file: Path) -> Layer:
    """A layer of Gemma Scope 1.

    Raises:
      BadInputError, CorruptError: a tensor has no part in it, is missing or does not fit.
    """
    tensors = files.read_npz(file)
    names = ("W_enc", "b_enc", "W_dec", "b_dec", "threshold")
    return _layer(file, tensors, names, 1, (BARE_INPUT, HOOKS[1]))


def second_layer(file: Path) -> Layer:
    """A layer of Gemma Scope 2.

    Raises:
      BadInputError, CorruptError: a tensor has no part in it, is missing or does not fit.
    """
    names = ("w_enc", "b_enc", "w_dec", "b_dec", "threshold")
    return _layer(file, files.read(file), names, 1, HOOKS)


def cross_layer_files(folder: Path) -> list[Path]:
    """The files of a cross-layer transcoder of Gemma Scope 2, in order.

    Raises:
      CorruptError: a layer is missing.
    """
    found = sorted(
        (int(match[1]), file)
        for file in folder.iterdir()
        if (match := CROSS_LAYER.fullmatch(file.name))
    )
    numbers = [number for number, _ in found]
    if numbers != list(range(len(found))):
        raise CorruptError(f"{folder} has encoders of layers {numbers}; copy the whole folder")
    return [file for _, file in found]


def cross_layer(found: Sequence[Path]) -> list[Layer]:
    """The layers of a cross-layer transcoder of Gemma Scope 2, from its files in order.

    Raises:
      BadInputError, CorruptError: a tensor has no part in it, is missing or does not fit.
    """
    names = ("w_enc", "b_enc", "w_dec", "b_dec", "threshold")
    return [
        _layer(file, files.read(file), names, len(found) - number, HOOKS, of=len(found))
        for number, file in enumerate(found)
    ]


def _layer(
    file: Path,
    tensors: Mapping[str, np.ndarray],
    names: tuple[str, ...],
    window: int,
    hooks: tuple[str, str],
    of: int | None = None,
) -> Layer:
    """A layer; `of` is the number of target layers in its file, None without such an axis."""
    encoder, encoder_bias, decoder, decoder_bias, threshold = names
    check_place(file)
    if _SCALE in tensors and not (tensors[_SCALE] == 1).all():
        raise BadInputError(f"{file}: {_SCALE} is not 1, and scaled inputs are not read here")
    files.check_known(file, tensors, {*names, _SKIP, _SCALE}, "transcoder of Gemma Scope")
    shape = tensors.get(encoder, np.zeros(())).shape
    if len(shape) != 2:
        raise CorruptError(f"{file}: {encoder} is missing or misshapen; copy the whole file")
    D, F = shape
    w_dec = files.get(file, tensors, decoder, (F, D) if of is None else (F, of, D), stored=True)
    skip_DD = None
    if _SKIP in tensors:
        skip_DD = np.ascontiguousarray(files.get(file, tensors, _SKIP, (D, D)).T)
    threshold_F = files.get(file, tensors, threshold, (F,))
    files.check_thresholds(file, threshold_F)
    return Layer(
        source=file,
        encoder_FD=np.ascontiguousarray(files.get(file, tensors, encoder, (D, F), stored=True).T),
        encoder_bias_F=files.get(file, tensors, encoder_bias, (F,)),
        decoder_FWD=w_dec[:, None] if of is None else w_dec[:, of - window :],
        decoder_bias_D=files.get(file, tensors, decoder_bias, (D,)),
        threshold_F=threshold_F,
        skip_DD=skip_DD,
        hooks=hooks,
    )
