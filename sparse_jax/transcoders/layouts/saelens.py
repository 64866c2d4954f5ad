"""Transcoders and autoencoders of SAELens: a folder with cfg.json and sae_weights.safetensors.

    W_enc [d_in, d_sae], W_dec [d_sae, d_out], b_enc, b_dec, and by architecture
    transcoder, jumprelu_transcoder                    threshold [d_sae] in the second
    skip_transcoder, jumprelu_skip_transcoder          W_skip [d_out, d_in] as well
    standard, jumprelu, topk, gated                    autoencoders: outputs are their inputs

With p = x W_enc + b_enc, features are relu(p), relu(p) where p is above its threshold, or the k
largest of p without those below 0. Where `apply_b_dec_to_input`, x is less b_dec. A threshold below
0 is 0. Versions before 6 have flat settings with other names. What was divided by during training
and is not in the file (`normalize_activations`) is refused. Of a model whose writing weights were
centred, the residual stream has no mean: an encoder reads it from ours less its own mean.
"""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
import re
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.files import read_json
from sparse_jax.transcoders.layouts import tensors as files
from sparse_jax.transcoders.layouts.layer import Layer

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
TRANSCODERS = {
    "transcoder": False,
    "skip_transcoder": False,
    "jumprelu_transcoder": True,
    "jumprelu_skip_transcoder": True,
}
AUTOENCODERS = ("standard", "jumprelu", "topk", "gated")
_HOOK = re.compile(r"blocks\.(\d+)\.(.+)")
# Names that are the same place, where TransformerLens splits the stream.
_SAME = {"hook_mlp_in": "hook_resid_mid"}
# Settings of TransformerLens that change what a hook holds.
_PROCESSING = ("fold_ln", "center_writing_weights", "fold_value_biases")


@dataclasses.dataclass(frozen=True)
class Description:
    """What cfg.json says, in one form for all versions.

    Attributes:
      file: file that it was read from.
      architecture: one of `TRANSCODERS` or `AUTOENCODERS`.
      inputs, outputs, features: sizes.
      subtracts: whether b_dec is subtracted from inputs.
      k: number of open features, of topk; 0 for others.
      scales: whether features of topk are ranked times the norms of their decoders.
      hook, hook_out: names of input and output in TransformerLens, with the block.
      processing: settings of TransformerLens that changed the weights of the model.
      model_name: name of the model.
    """

    file: Path
    architecture: str
    inputs: int
    outputs: int
    features: int
    subtracts: bool
    k: int
    scales: bool
    hook: str
    hook_out: str
    processing: tuple[str, ...]
    model_name: str

    @property
    def place(self) -> tuple[int, str]:
        """Number of the block, and the input's name in it."""
        return _place(self.file, self.hook)


def describe(folder: Path) -> Description:
    """The settings of a folder.

    Raises:
      BadInputError: another architecture, or scaled activations.
      CorruptError: a field is missing.
    """
    file = folder / CONFIG
    raw = read_json(file)
    if not isinstance(raw, dict):
        raise CorruptError(f"{file} holds no settings; copy the whole folder")
    metadata = raw["metadata"] if isinstance(raw.get("metadata"), dict) else {}
    both = raw | metadata
    new = "sae_lens_version" in metadata
    architecture = both.get("architecture", "standard")
    activation = both.get("activation_fn", both.get("activation_fn_str", "relu"))
    options = both.get("activation_fn_kwargs") or {}
    if activation not in ("relu", "topk"):
        raise BadInputError(f"{file}: the activation is {activation!r}; give one of relu or topk")
    if activation == "topk" and architecture == "standard":
        architecture = "topk"
    k = 0
    if architecture == "topk":
        k = both.get("k", options.get("k") if isinstance(options, dict) else None)
        if isinstance(k, bool) or not isinstance(k, int) or not 0 < k <= int(both.get("d_sae", k)):
            raise BadInputError(
                f"{file}: k is {k!r}, and topk needs the number of features that are open at a "
                "token; write it there"
            )
    if architecture not in (*TRANSCODERS, *AUTOENCODERS):
        known = ", ".join((*TRANSCODERS, *AUTOENCODERS))
        raise BadInputError(f"{file}: architecture is {architecture!r}; give one of {known}")
    scaled = both.get("normalize_activations") or "none"
    if scaled is True:
        scaled = "expected_average_only_in"
    if scaled != "none":
        raise BadInputError(
            f"{file}: normalize_activations is {scaled!r}, a scale that the file does not have; "
            "fold it into the weights (fold_activation_norm_scaling_factor in SAELens) and save it "
            "again"
        )
    if both.get("reshape_activations", "none") not in ("none", None):
        raise BadInputError(
            f"{file}: reshape_activations is {both['reshape_activations']!r}; outputs of heads are "
            "not read here"
        )
    kwargs = both.get("model_from_pretrained_kwargs")
    kwargs = kwargs if isinstance(kwargs, dict) else {}
    try:
        return Description(
            file=file,
            architecture=architecture,
            inputs=int(both["d_in"]),
            outputs=int(both.get("d_out") or both["d_in"]),
            features=int(both["d_sae"]),
            # The older form leaves it out where it is so.
            subtracts=bool(both.get("apply_b_dec_to_input", architecture not in TRANSCODERS)),
            k=k,
            scales=bool(new and both.get("rescale_acts_by_decoder_norm", False)),
            hook=str(both.get("hook_name") or both["hook_point"]),
            hook_out=str(both.get("hook_name_out") or ""),
            processing=tuple(name for name in _PROCESSING if kwargs.get(name)),
            model_name=str(both.get("model_name") or ""),
        )
    except KeyError as error:
        raise CorruptError(f"{file}: {error.args[0]} is missing; copy the whole folder") from error
    except (TypeError, ValueError) as error:
        raise CorruptError(
            f"{file}: a size is no number ({error}); copy the whole folder"
        ) from error


def layer(folder: Path) -> tuple[int, Layer]:
    """The block and the features of a transcoder.

    Raises:
      BadInputError: it is an autoencoder, or a tensor has no part in it.
      CorruptError: a tensor is missing or does not fit.
    """
    described = describe(folder)
    if described.architecture not in TRANSCODERS:
        raise BadInputError(
            f"{folder}: a {described.architecture} autoencoder of {described.hook} stands for no "
            "MLP, so that it has no graph; read it by sparse_jax.transcoders.load_autoencoder"
        )
    number, reads = described.place
    other, writes = _place(described.file, described.hook_out)
    if other != number or described.inputs != described.outputs:
        raise BadInputError(
            f"{folder}: it reads {described.hook} and writes {described.hook_out}; a graph needs "
            "input and output of one MLP"
        )
    if described.processing:
        raise BadInputError(
            f"{described.file}: it is of a model with {', '.join(described.processing)}, whose "
            "MLPs write something else than those of the checkpoint; give one of the model as it is"
        )
    file = folder / WEIGHTS
    tensors = files.read(file)
    D, F = described.inputs, described.features
    has_thresholds = TRANSCODERS[described.architecture]
    has_skip = "skip" in described.architecture
    known = {"W_enc", "W_dec", "b_enc", "b_dec"}
    known |= {"threshold"} if has_thresholds else set()
    known |= {"W_skip"} if has_skip else set()
    files.check_known(file, tensors, known, described.architecture)
    return number, Layer(
        source=folder,
        encoder_FD=np.ascontiguousarray(files.get(file, tensors, "W_enc", (D, F)).T),
        encoder_bias_F=_encoder_bias(described, file, tensors),
        decoder_FWD=files.get(file, tensors, "W_dec", (F, D))[:, None],
        decoder_bias_D=files.get(file, tensors, "b_dec", (D,)),
        threshold_F=files.get(file, tensors, "threshold", (F,)).clip(0) if has_thresholds else None,
        skip_DD=files.get(file, tensors, "W_skip", (D, D)) if has_skip else None,
        hooks=(reads, writes),
        model_name=described.model_name,
    )


def _encoder_bias(
    described: Description, file: Path, tensors: Mapping[str, np.ndarray]
) -> np.ndarray:
    """The bias of the encoder, of inputs from which nothing is subtracted."""
    D, F = described.inputs, described.features
    bias_F = files.get(file, tensors, "b_enc", (F,))
    if not described.subtracts:
        return bias_F
    w_DF = files.get(file, tensors, "W_enc", (D, F)).astype(np.float64)
    shift_F = files.get(file, tensors, "b_dec", (D,)).astype(np.float64) @ w_DF
    return (bias_F - shift_F).astype(np.float32)


def _place(file: Path, hook: Any) -> tuple[int, str]:
    match = _HOOK.fullmatch(str(hook))
    if match is None:
        raise BadInputError(
            f"{file}: the hook {hook!r} is not blocks.<number>.<name>, as TransformerLens has it; "
            "write it so"
        )
    return int(match[1]), _SAME.get(match[2], match[2])
