"""Transcoders on disk, in the layout that circuit-tracer 0.4 reads.

    config.yaml               model_kind, model_name, feature_input_hook, feature_output_hook, scan
    W_enc_<s>.safetensors     W_enc_<s> [F, D], b_enc_<s> [F], b_dec_<s> [D], threshold_<s> [F]
    W_dec_<s>.safetensors     W_dec_<s> [F, L - s, D]: axis 1 begins at the layer itself, and is
                              zero beyond the window
    transcoder.json           what that layout has no place for: our sizes with the window, the
                              digest of the model, numbers of the run, the first tokens that
                              training left out; written last

Features without a threshold are ReLU. A folder without `transcoder.json` comes from elsewhere and
is read too, as it has no digest, for any model of its sizes. Its features must read the input of an
MLP, after the norm and its weights ("mlp.hook_in"), and write what the MLP adds to the residual
stream ("hook_mlp_out"). "ln2.hook_normalized" is the same where norms have no weights, and
"mlp.hook_out" where MLP outputs pass no norm (`Transcoder.check`); other hooks are refused.
"""

from collections.abc import Mapping
import dataclasses
import os
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import yaml

from lm_jax.assets import published
from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run.config import config_hash
from lm_jax.run.files import new_folder, read_json, write_bytes, write_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.results import Count, InvalidError, parse_result
from lm_jax.weights.identity import canonical, weights_digest
from sparse_jax.transcoders.transcoder import (
    BARE_INPUT,
    BARE_OUTPUT,
    HOOKS,
    Transcoder,
    TranscoderConfig,
)

CONFIG, NOTE = "config.yaml", "transcoder.json"
_KIND = "cross_layer_transcoder"
_FORMAT = 2
# Its folders name another input in config.yaml than the one that they read, which is `HOOKS`.
_OTHER_HOOKS = 1
# By field of config.yaml, the names that may be inputs and outputs of MLPs.
_READ = {
    "feature_input_hook": (HOOKS[0], BARE_INPUT),
    "feature_output_hook": (HOOKS[1], BARE_OUTPUT),
}
_ENCODER = ("W_enc", "b_enc", "b_dec", "threshold")
_SITES = {
    "feature_input_hook": "input of each MLP after its norm",
    "feature_output_hook": "output of each MLP",
}


@dataclasses.dataclass(frozen=True)
class Origin:
    """Where a transcoder comes from.

    Attributes:
      model_name: name of the model that it was trained on.
      model_sha256: identity of that model (`ModelIdentity.text`), in files of earlier versions the
        digest of its weights; "" if it is not known.
      numbers: results of the run, by name.
    """

    model_name: str
    model_sha256: str = ""
    numbers: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Note:
    """`transcoder.json`: sizes, the fields of `Origin`, and `Transcoder.skip_start`.

    Files of earlier versions do not say which first tokens were left out: then it is 0.
    """

    format: int
    config: TranscoderConfig
    model_name: str
    model_sha256: str
    numbers: dict[str, Any]
    skip_start: Count = 0


def save(folder: str | os.PathLike[str], transcoder: Transcoder, origin: Origin) -> None:
    """Writes a transcoder of raw activations (`Transcoder.folded`).

    Raises:
      BadInputError: the folder exists.
      StorageError: it cannot be written.
    """
    from safetensors.numpy import save as to_bytes

    cfg, params = transcoder.cfg, transcoder.params
    theta_LF = np.asarray(transcoder.theta_LF, np.float32)
    with new_folder(folder) as draft:
        for layer in range(cfg.num_layers):
            tensors = {
                f"W_enc_{layer}": params["encoder"][layer],
                f"b_enc_{layer}": params["encoder_bias"][layer],
                f"b_dec_{layer}": params["decoder_bias"][layer],
            }
            if cfg.has_thresholds:
                tensors[f"threshold_{layer}"] = theta_LF[layer]
            zero_FD = np.zeros((cfg.features, cfg.hidden_size), np.float32)
            decoders_FSD = np.stack(
                [
                    transcoder.decoder(layer, to) if to in cfg.targets(layer) else zero_FD
                    for to in range(layer, cfg.num_layers)
                ],
                axis=1,
            )
            for name, each in (
                (f"W_enc_{layer}", tensors),
                (f"W_dec_{layer}", {f"W_dec_{layer}": decoders_FSD}),
            ):
                arrays = {
                    key: np.ascontiguousarray(np.asarray(x, np.float32)) for key, x in each.items()
                }
                write_bytes(draft / f"{name}.safetensors", to_bytes(arrays))
        description = {
            "model_kind": _KIND,
            "model_name": origin.model_name,
            **dict(zip(_READ, transcoder.hooks, strict=True)),
            "scan": origin.model_name,
        }
        write_bytes(draft / CONFIG, yaml.safe_dump(description, sort_keys=False).encode())
        numbers = dict(origin.numbers)
        names = origin.model_name, origin.model_sha256
        note = Note(_FORMAT, cfg, *names, numbers, transcoder.skip_start)
        write_json(draft / NOTE, note)


def load(folder: str | os.PathLike[str]) -> tuple[Transcoder, Origin]:
    """Reads a folder that `save` or circuit-tracer wrote, or the published one of that name.

    Raises:
      BadInputError: it is no cross-layer transcoder, one of another version, one that reads or
        writes something else than inputs and outputs of MLPs, or one with further tensors.
      CorruptError: a file is damaged, or a tensor missing, of another shape or not finite.
    """
    folder = published.resolve(folder)
    description = _description(folder)
    names = (file.stem.removeprefix("W_enc_") for file in folder.glob("W_enc_*.safetensors"))
    layers = sorted(int(name) for name in names if name.isdecimal())
    if not layers or layers != list(range(len(layers))):
        raise CorruptError(f"{folder} has encoders of layers {layers}; copy the whole folder")
    encoders = [_read(folder / f"W_enc_{layer}.safetensors") for layer in layers]
    decoders = [_read(folder / f"W_dec_{layer}.safetensors") for layer in layers]
    cfg, origin, hooks, skip_start = _describe(folder, description, encoders, decoders)
    params = _params(folder, cfg, encoders, decoders)
    return Transcoder(params, cfg, hooks, skip_start), origin


def identity(folder: str | os.PathLike[str]) -> ModelIdentity:
    """Which transcoder a folder holds: digests of its tensors, and of what else decides features.

    That is their kind and sizes, what they read and write, and the first tokens that have none;
    names, numbers and how the files spell them do not count.

    Raises:
      BadInputError, CorruptError: as `load`, of its two files of settings.
    """
    folder = published.resolve(folder)
    description = _description(folder)
    tensors = list(folder.glob("*.safetensors"))
    layers = sum(file.name.startswith("W_enc_") for file in tensors)
    note = _note(folder / NOTE, layers) if (folder / NOTE).is_file() else None
    settings = [
        None if note is None else note.config,
        _hooks_of(folder, description, note),
        0 if note is None else note.skip_start,
    ]
    return ModelIdentity(weights_digest(tensors), config_hash(canonical(settings)))


def _description(folder: Path) -> dict[str, Any]:
    """The content of config.yaml."""
    if not (folder / CONFIG).is_file():
        raise BadInputError(
            f"{folder} has no {CONFIG}, so it is no transcoder{published.hint(folder)}"
        )
    try:
        description = yaml.safe_load((folder / CONFIG).read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CorruptError(f"{folder / CONFIG} is damaged: {error}") from error
    if not isinstance(description, dict) or description.get("model_kind") != _KIND:
        kind = description.get("model_kind") if isinstance(description, dict) else None
        raise BadInputError(f"{folder / CONFIG}: model_kind is {kind!r}, not {_KIND!r}")
    return description


def _hooks_of(folder: Path, description: Mapping[str, Any], note: Note | None) -> tuple[str, str]:
    is_other = note is not None and note.format == _OTHER_HOOKS
    return HOOKS if is_other else _hooks(folder / CONFIG, description)


def _hooks(file: Path, description: Mapping[str, Any]) -> tuple[str, str]:
    """What features read and write, by the names in config.yaml."""
    for field, known in _READ.items():
        if description.get(field) not in known:
            raise BadInputError(
                f"{file}: {field} is {description.get(field)!r}, and a transcoder stands for MLPs "
                f"here; give one with {' or '.join(known)}, the {_SITES[field]}"
            )
    return description["feature_input_hook"], description["feature_output_hook"]


def _read(file: Path) -> dict[str, np.ndarray]:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    if not file.is_file():
        raise CorruptError(f"{file} is missing; copy the whole folder")
    try:
        return load_file(file)
    except SafetensorError as error:
        raise CorruptError(f"{file} is damaged: {error}") from error


def _describe(
    folder: Path,
    description: Mapping[str, Any],
    encoders: list[dict[str, np.ndarray]],
    decoders: list[dict[str, np.ndarray]],
) -> tuple[TranscoderConfig, Origin, tuple[str, str], int]:
    file = folder / NOTE
    if file.is_file():
        note = _note(file, len(encoders))
        hooks = _hooks_of(folder, description, note)
        origin = Origin(note.model_name, note.model_sha256, note.numbers)
        return note.config, origin, hooks, note.skip_start
    hooks = _hooks_of(folder, description, None)
    try:
        features, hidden = encoders[0]["W_enc_0"].shape
        _, written, _ = decoders[0]["W_dec_0"].shape
    except (KeyError, ValueError) as error:
        raise CorruptError(f"{folder}: W_enc_0 or W_dec_0 is missing or misshapen") from error
    layers = len(encoders)
    cfg = TranscoderConfig(
        layers,
        hidden,
        features,
        kind="jumprelu" if "threshold_0" in encoders[0] else "relu",
        window=None if written == layers else written,
    )
    return cfg, Origin(model_name=str(description.get("model_name", ""))), hooks, 0


def _note(file: Path, layers: int) -> Note:
    """The note of a folder with encoders of `layers` layers."""
    tree = read_json(file)
    if isinstance(tree, dict) and tree.get("format") not in (_OTHER_HOOKS, _FORMAT):
        raise BadInputError(
            f"{file}: format {tree.get('format')!r} is not {_FORMAT}; export it again"
        )
    try:
        note = parse_result(tree, Note)
    except InvalidError as error:
        raise CorruptError(f"{file} is damaged: {error}; copy the whole folder") from error
    if note.config.num_layers != layers:
        raise CorruptError(
            f"{file}: config.num_layers is {note.config.num_layers}, and the folder has encoders "
            f"of {layers} layers; copy the whole folder"
        )
    return note


def _params(
    folder: Path,
    cfg: TranscoderConfig,
    encoders: list[dict[str, np.ndarray]],
    decoders: list[dict[str, np.ndarray]],
) -> dict[str, Any]:
    D, F = cfg.hidden_size, cfg.features

    def tensor(
        tensors: Mapping[str, np.ndarray], name: str, *shapes: tuple[int, ...]
    ) -> np.ndarray:
        x = tensors.get(name)
        if x is None or x.shape not in shapes:
            actual = "missing" if x is None else f"of shape {x.shape}"
            raise CorruptError(f"{folder}: {name} is {actual}; it must be {shapes[0]}")
        if not np.isfinite(x).all():
            raise CorruptError(f"{folder}: {name} has values that are not finite")
        return np.asarray(x, np.float32)

    def stacked(prefix: str, shape: tuple[int, ...]) -> jnp.ndarray:
        each = [tensor(tensors, f"{prefix}_{s}", shape) for s, tensors in enumerate(encoders)]
        return jnp.asarray(np.stack(each))

    def decoders_of(source: int) -> np.ndarray:
        name, later = f"W_dec_{source}", cfg.num_layers - source
        written = len(cfg.targets(source))
        # The first format, and others, leave out what is beyond the window.
        w_FSD = tensor(decoders[source], name, (F, later, D), (F, written, D))
        if w_FSD[:, written:].any():
            raise CorruptError(
                f"{folder}: {name} writes beyond the window of {cfg.window} in {NOTE}; copy the "
                "whole folder"
            )
        return w_FSD

    for s, tensors in enumerate(encoders):
        known = {f"{prefix}_{s}" for prefix in _ENCODER[: 4 if cfg.has_thresholds else 3]}
        for name in sorted(tensors.keys() - known):
            raise BadInputError(
                f"{folder}: {name} has no part in a {cfg.kind} transcoder; give one without it"
            )
    by_source = [decoders_of(source) for source in range(cfg.num_layers)]
    decoder = {
        f"to_{to}": jnp.asarray(np.stack([by_source[s][:, to - s] for s in cfg.sources(to)]))
        for to in range(cfg.num_layers)
    }
    params = {
        "encoder": stacked("W_enc", (F, D)),
        "encoder_bias": stacked("b_enc", (F,)),
        "decoder": decoder,
        "decoder_bias": stacked("b_dec", (D,)),
    }
    if cfg.has_thresholds:
        theta_LF = stacked("threshold", (F,))
        if not (np.asarray(theta_LF) >= 0).all():
            raise CorruptError(f"{folder}: thresholds must be at least 0")
        params["threshold"] = theta_LF
    return params
