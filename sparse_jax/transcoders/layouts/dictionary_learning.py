"""Autoencoders of dictionary_learning: a folder with config.json and ae.safetensors.

The program itself saves `ae.pt`, a pickle, which is never opened here. Outside of this project,

    tensors = torch.load("ae.pt", weights_only=True, map_location="cpu")
    safetensors.torch.save_file({k: v.contiguous() for k, v in tensors.items()}, "ae.safetensors")

writes the same tensors, by the class of the autoencoder (`trainer.dict_class` in config.json):

    AutoEncoder            encoder.weight [F, D], encoder.bias, decoder.weight [D, F], bias
    AutoEncoderTopK        encoder.weight, encoder.bias, decoder.weight, b_dec, k; the k largest
    BatchTopKSAE           the same with a threshold of all features
    JumpReluAutoEncoder    W_enc [D, F], b_enc, W_dec [F, D], b_dec, threshold [F]
    GatedAutoEncoder       encoder.weight, decoder.weight, decoder_bias, gate_bias, mag_bias, r_mag

All but JumpReluAutoEncoder subtract the decoder's bias from inputs. No feature is below 0. The
program divides the rows of an AutoEncoder's decoder by their lengths when it loads one, unless told
otherwise; here tensors are read as they are.
"""

import dataclasses
from pathlib import Path
import re

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import read_json
from sparse_jax.transcoders.layouts import tensors as files

CONFIG, WEIGHTS, PICKLE = "config.json", "ae.safetensors", "ae.pt"
_PLACE = re.compile(r"(resid_post|resid_pre)_layer_(\d+)")


@dataclasses.dataclass(frozen=True)
class Read:
    """The arrays of an autoencoder, encoders as rows, and where it reads.

    Attributes:
      bias_F: bias of the encoder; of a gated one that of the magnitude.
      subtracts: whether the decoder's bias is subtracted from inputs.
      threshold_F: values above which features are open.
      gate_bias_F, magnitude_F: bias of the gate, factor behind it; None for all that is not gated.
      k: number of open features; 0 for others.
    """

    encoder_FD: np.ndarray
    bias_F: np.ndarray
    decoder_FD: np.ndarray
    decoder_bias_D: np.ndarray
    subtracts: bool
    threshold_F: np.ndarray
    gate_bias_F: np.ndarray | None
    magnitude_F: np.ndarray | None
    k: int
    site: str
    layer: int
    model_name: str


def read(folder: Path) -> Read:
    """The autoencoder of a folder.

    Raises:
      BadInputError: another class or place, or a tensor without a part in it.
      CorruptError: a field or tensor is missing, or of another shape.
    """
    file, config = folder / WEIGHTS, read_json(folder / CONFIG)
    trainer = config.get("trainer") if isinstance(config, dict) else None
    if not isinstance(trainer, dict):
        raise CorruptError(f"{folder / CONFIG}: trainer is missing; copy the whole folder")
    if not file.is_file():
        raise BadInputError(
            f"{folder} has {PICKLE}, a pickle, which is never opened here; save its tensors as "
            f"{WEIGHTS} (docs/sparse/dictionaries)"
        )
    buffer = config.get("buffer")
    if isinstance(buffer, dict) and buffer.get("io", "out") != "out":
        raise BadInputError(
            f"{folder / CONFIG}: buffer.io is {buffer['io']!r}, and an autoencoder is of one place "
            "(out)"
        )
    site, layer = _place(folder / CONFIG, str(trainer.get("submodule_name") or ""))
    kind, tensors = str(trainer.get("dict_class")), files.read(file)
    try:
        D, F = int(trainer["activation_dim"]), int(trainer["dict_size"])
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptError(
            f"{folder / CONFIG}: trainer.activation_dim or dict_size is missing; copy the whole "
            "folder"
        ) from error

    def get(name: str, *shape: int) -> np.ndarray:
        return files.get(file, tensors, name, shape)

    threshold_F, gate_bias_F, magnitude_F, k = np.zeros(F, np.float32), None, None, 0
    if kind == "JumpReluAutoEncoder":
        known = {"W_enc", "b_enc", "W_dec", "b_dec", "threshold"}
        encoder_FD, bias_F, decoder_FD = get("W_enc", D, F).T, get("b_enc", F), get("W_dec", F, D)
        bias_name, threshold_F = "b_dec", get("threshold", F).clip(0)
    elif kind in ("AutoEncoder", "AutoEncoderTopK", "BatchTopKSAE", "GatedAutoEncoder"):
        encoder_FD, decoder_FD = get("encoder.weight", F, D), get("decoder.weight", D, F).T
        known = {"encoder.weight", "decoder.weight"}
        if kind == "GatedAutoEncoder":
            known |= {"gate_bias", "mag_bias", "r_mag"}
            bias_name, bias_F, gate_bias_F = "decoder_bias", get("mag_bias", F), get("gate_bias", F)
            magnitude_F = np.exp(get("r_mag", F))
        else:
            known |= {"encoder.bias"}
            bias_name, bias_F = "bias" if kind == "AutoEncoder" else "b_dec", get("encoder.bias", F)
        if kind in ("AutoEncoderTopK", "BatchTopKSAE"):
            known |= {"k", "threshold"}
        if kind == "AutoEncoderTopK":
            k = tensors["k"].reshape(-1)[0] if "k" in tensors else trainer.get("k")
            k = int(k) if isinstance(k, int | np.integer) else 0
        if kind == "BatchTopKSAE":
            threshold_F = np.full(F, get("threshold").clip(0), np.float32)
        known |= {bias_name}
    else:
        raise BadInputError(
            f"{folder / CONFIG}: trainer.dict_class is {kind!r}; give an AutoEncoder, "
            "AutoEncoderTopK, BatchTopKSAE, JumpReluAutoEncoder or GatedAutoEncoder"
        )
    files.check_known(file, tensors, known, kind)
    if kind == "AutoEncoderTopK" and not 0 < k <= F:
        raise BadInputError(f"{folder / CONFIG}: k is {k}; it must be 1 to {F}")
    return Read(
        encoder_FD=encoder_FD,
        bias_F=bias_F,
        decoder_FD=decoder_FD,
        decoder_bias_D=get(bias_name, D),
        subtracts=kind != "JumpReluAutoEncoder",
        threshold_F=threshold_F,
        gate_bias_F=gate_bias_F,
        magnitude_F=magnitude_F,
        k=k,
        site=site,
        layer=layer,
        model_name=str(trainer.get("lm_name") or ""),
    )


def _place(file: Path, name: str) -> tuple[str, int]:
    match = _PLACE.fullmatch(name)
    if match is None:
        raise BadInputError(
            f"{file}: trainer.submodule_name is {name!r}, and resid_post_layer_<number> or "
            "resid_pre_layer_<number> is read here; write it so"
        )
    return match[1], int(match[2])
