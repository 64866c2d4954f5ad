"""Transcoders of sparsify: folders `layers.<l>.mlp` (or `h.<l>.mlp`), cfg.json, sae.safetensors.

    encoder.weight [F, D], encoder.bias [F], W_dec [F, D], b_dec [D], W_skip [D, D]

Features are the k largest of relu(x encoder + bias). With `transcode` x is the input of the MLP
after its norm, from which nothing is subtracted, and the output is that of the MLP itself, before
any norm that follows it. Without `transcode` it is an autoencoder.
"""

from pathlib import Path
import re

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import read_json
from sparse_jax.transcoders.layouts import tensors as files
from sparse_jax.transcoders.layouts.layer import Layer
from sparse_jax.transcoders.transcoder import BARE_OUTPUT, HOOKS

CONFIG, WEIGHTS = "cfg.json", "sae.safetensors"
FOLDER = re.compile(r"(?:layers|h)\.(\d+)\.mlp")


def layer(folder: Path) -> tuple[int, Layer]:
    """The block and the features of a transcoder.

    Raises:
      BadInputError: it is an autoencoder, has another activation, or a tensor has no part in it.
      CorruptError: a tensor is missing or does not fit.
    """
    config = read_json(folder / CONFIG)
    if not isinstance(config, dict):
        raise CorruptError(f"{folder / CONFIG} holds no settings; copy the whole folder")
    match = FOLDER.fullmatch(folder.name)
    if not config.get("transcode") or match is None:
        raise BadInputError(
            f"{folder}: it is no transcoder of an MLP (transcode: true in cfg.json, in a folder "
            "layers.<number>.mlp or h.<number>.mlp), so that it has no graph"
        )
    activation = config.get("activation", "topk")
    if activation != "topk":
        raise BadInputError(f"{folder / CONFIG}: activation is {activation!r}; give one of topk")
    for field in ("signed", "gram_lookup"):
        if config.get(field):
            raise BadInputError(
                f"{folder / CONFIG}: {field} is {config[field]!r}, which is not read here; give a "
                "transcoder without it"
            )
    k, file = config.get("k"), folder / WEIGHTS
    tensors = files.read(file)
    known = {"encoder.weight", "encoder.bias", "W_dec", "b_dec"}
    known |= {"W_skip"} if config.get("skip_connection") else set()
    files.check_known(file, tensors, known, "transcoder of sparsify")
    shape = tensors["encoder.weight"].shape if "encoder.weight" in tensors else ()
    if len(shape) != 2:
        raise CorruptError(f"{file}: encoder.weight is missing or misshapen; copy the whole folder")
    F, D = shape
    if isinstance(k, bool) or not isinstance(k, int) or not 0 < k <= F:
        raise BadInputError(f"{folder / CONFIG}: k is {k!r}; it must be 1 to {F}")
    return int(match[1]), Layer(
        source=folder,
        encoder_FD=files.get(file, tensors, "encoder.weight", (F, D)),
        encoder_bias_F=files.get(file, tensors, "encoder.bias", (F,)),
        decoder_FWD=files.get(file, tensors, "W_dec", (F, D))[:, None],
        decoder_bias_D=files.get(file, tensors, "b_dec", (D,)),
        skip_DD=files.get(file, tensors, "W_skip", (D, D)) if "W_skip" in known else None,
        k=k,
        hooks=(HOOKS[0], BARE_OUTPUT),
    )
