"""Transcoders on disk: public layouts are read (`layouts`), circuit-tracer's are written.

`save` writes a cross-layer transcoder, or a set of per-layer ones for a window of 1, and

    transcoder.json           what those layouts have no place for: our sizes with the window, the
                              digest of the model, numbers of the run, the first tokens that
                              training left out; written last

A folder without `transcoder.json` comes from elsewhere and is read too, as it has no digest, for
any model of its sizes. Its features may read the input of an MLP after the norm and its weights
("mlp.hook_in"), before these weights ("ln2.hook_normalized") or before the norm
("hook_resid_mid"), and must write what the MLP adds to the residual stream ("hook_mlp_out");
"mlp.hook_out" is the same where MLP outputs pass no norm (`Transcoder.check`). Other hooks are
refused.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from lm_jax.assets import published
from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.run import downloads
from lm_jax.run.config import config_hash
from lm_jax.run.files import new_folder, read_json, write_bytes, write_json
from lm_jax.run.identity import ModelIdentity
from lm_jax.run.results import Count, InvalidError, parse_result
from lm_jax.weights import hub
from lm_jax.weights.identity import canonical, weights_digest
from sparse_jax.transcoders.layouts import circuit_tracer, folders
from sparse_jax.transcoders.layouts.circuit_tracer import CROSS_LAYER, PER_LAYER
from sparse_jax.transcoders.transcoder import HOOKS, Transcoder, TranscoderConfig

CONFIG, NOTE = "config.yaml", "transcoder.json"
_FORMAT = 2
# Its folders name another input in config.yaml than the one that they read, which is `HOOKS`.
_OTHER_HOOKS = 1


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
      UsageError: the layout has no place for it: W_skip of a cross-layer transcoder, or TopK that
        leaves out negative features, since circuit-tracer's keeps them.
      StorageError: it cannot be written.
    """
    from safetensors.numpy import save as to_bytes

    cfg = transcoder.cfg
    if cfg.window != 1 and transcoder.skip_LDD is not None:
        raise UsageError(
            "transcoder: the layout of cross-layer transcoders has no place for W_skip; save one "
            "with window=1"
        )
    if cfg.kind == "topk" and cfg.rectified:
        raise UsageError(
            "transcoder: circuit-tracer's TopK keeps features below 0, which this one leaves out; "
            "keep its own files"
        )
    with new_folder(folder) as draft:
        for name, tensors in _tensors(transcoder):
            arrays = {
                key: np.ascontiguousarray(np.asarray(x, np.float32)) for key, x in tensors.items()
            }
            write_bytes(draft / f"{name}.safetensors", to_bytes(arrays))
        description = {
            "model_kind": PER_LAYER if cfg.window == 1 else CROSS_LAYER,
            "model_name": origin.model_name,
            **dict(zip(circuit_tracer.HOOK_FIELDS, transcoder.hooks, strict=True)),
            "scan": origin.model_name,
        }
        if cfg.kind == "topk":
            description |= {"activation": "topk", "k": cfg.k}
        write_bytes(draft / CONFIG, yaml.safe_dump(description, sort_keys=False).encode())
        numbers = dict(origin.numbers)
        names = origin.model_name, origin.model_sha256
        note = Note(_FORMAT, cfg, *names, numbers, transcoder.skip_start)
        write_json(draft / NOTE, note)


def _tensors(transcoder: Transcoder) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """The tensors of each file, by its name without ending."""
    cfg, params = transcoder.cfg, transcoder.params
    theta_LF = np.asarray(transcoder.theta_LF, np.float32)
    for layer in range(cfg.num_layers):
        encoder = {
            "W_enc": params["encoder"][layer],
            "b_enc": params["encoder_bias"][layer],
            "b_dec": params["decoder_bias"][layer],
        }
        if cfg.window == 1:
            encoder["W_dec"] = transcoder.decoder(layer, layer)
            if cfg.has_thresholds:
                encoder["activation_function.threshold"] = theta_LF[layer]
            if transcoder.skip_LDD is not None:
                encoder["W_skip"] = transcoder.skip_LDD[layer]
            yield f"layer_{layer}", encoder
            continue
        if cfg.has_thresholds:
            encoder["threshold"] = theta_LF[layer]
        yield f"W_enc_{layer}", {f"{name}_{layer}": x for name, x in encoder.items()}
        zero_FD = np.zeros((cfg.features, cfg.hidden_size), np.float32)
        decoders = [
            transcoder.decoder(layer, to) if to in cfg.targets(layer) else zero_FD
            for to in range(layer, cfg.num_layers)
        ]
        yield f"W_dec_{layer}", {f"W_dec_{layer}": np.stack(decoders, axis=1)}


def resolve(source: str | os.PathLike[str]) -> Path:
    """The folder of a source: a path, a published name, or a repository of the hub.

    A repository is `ORG/NAME` or, with a folder in it, `ORG/NAME/FOLDER`, and either with
    `@REVISION`. What is downloaded is its config.yaml and what that lists, or all tensors and
    settings of the folder.

    Raises:
      BadInputError: the source is in none of these places, or a download failed.
    """
    folder, name = published.resolve(source), os.fspath(source)
    match = hub.PART.fullmatch(name)
    if folder.exists() or match is None or name.startswith("."):
        return folder
    found = hub.part(name, [CONFIG])
    description = _yaml(found / CONFIG) if found and (found / CONFIG).is_file() else None
    if found and isinstance(description, dict) and "transcoders" in description:
        # What it lists of its own repository; others are looked up where they are read.
        own = [path for path in folders.listed(found, description) if folders.HUB not in path]
        found = hub.part(name, [CONFIG, *own, *(f"{path}/*" for path in own)])
    elif description is not None or match[2] or not downloads.are_allowed():
        found = hub.part(name, [*folders.PATTERNS, NOTE])
    else:
        raise BadInputError(
            f"{name} has no {CONFIG}, so that it may hold transcoders of many sizes; name a folder "
            "of it, ORG/NAME/FOLDER"
        )
    if found is None:
        raise BadInputError(
            f"{name} is no folder here, and not in the cache of the Hugging Face hub {hub.cache()};"
            " add --download (lm_jax.run.downloads.allowed(True)), or copy its files here"
        )
    return found


def _yaml(file: Path) -> Any:
    """The content of a file.

    Raises:
      CorruptError: it is no YAML.
    """
    try:
        return yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise CorruptError(f"{file} is damaged: {' '.join(str(error).split())}") from error


def load(folder: str | os.PathLike[str]) -> tuple[Transcoder, Origin]:
    """Reads a folder in one of the public layouts (`layouts.folders`).

    Args:
      folder: path, published name, or repository of the hub (`resolve`).

    Raises:
      BadInputError: it is no transcoder, one of another version, one that reads or writes something
        else than inputs and outputs of MLPs, or one with further tensors.
      CorruptError: a file is damaged, or a tensor missing, of another shape or not finite.
    """
    folder = resolve(folder)
    if not (folder / CONFIG).is_file() and folders.is_known(folder):
        transcoder, model_name = folders.read_other(folder)
        return transcoder, Origin(model_name)
    description = _description(folder)
    note = _noted(folder, description)
    hooks = _hooks_of(folder, description, note)
    if note is None:
        origin = Origin(model_name=str(description.get("model_name", "")))
        return folders.read_described(folder, description, None, hooks), origin
    transcoder = folders.read_described(folder, description, note.config, hooks)
    origin = Origin(note.model_name, note.model_sha256, note.numbers)
    return dataclasses.replace(transcoder, skip_start=note.skip_start), origin


def identity(folder: str | os.PathLike[str]) -> ModelIdentity:
    """Which transcoder a folder holds: digests of its tensors, and of what else decides features.

    That is their kind and sizes, what they read and write, and the first tokens that have none;
    names, numbers and how the files spell them do not count.

    Raises:
      BadInputError, CorruptError: as `load`, of its two files of settings.
    """
    folder = resolve(folder)
    if not (folder / CONFIG).is_file() and folders.is_known(folder):
        others = [read_json(file) for file in folders.setting_files(folder)]
        return _identity(folders.weight_files(folder), others)
    description = _description(folder)
    note = _noted(folder, description)
    settings: list[Any] = [
        None if note is None else note.config,
        _hooks_of(folder, description, note),
        0 if note is None else note.skip_start,
    ]
    if description.get("activation") == "topk":
        settings.append([description["activation"], description.get("k")])
    if "transcoders" in description:
        each = [_identity(*_parts(place)) for place in folders.places(folder, description)]
        return _identity([], [settings, [one.text for one in each]])
    return _identity(list(folder.glob("*.safetensors")), settings)


def _parts(place: Path) -> tuple[list[Path], list[Any]]:
    """The files of tensors and the settings of one layer."""
    if not place.is_dir():
        return [place], []
    return folders.weight_files(place), [read_json(file) for file in folders.setting_files(place)]


def _identity(files: list[Path], settings: list[Any]) -> ModelIdentity:
    return ModelIdentity(weights_digest(files), config_hash(canonical(settings)))


def _description(folder: Path) -> dict[str, Any]:
    """The content of config.yaml."""
    if not (folder / CONFIG).is_file():
        raise BadInputError(
            f"{folder} has no {CONFIG}, so it is no transcoder{published.hint(folder)}"
        )
    description = _yaml(folder / CONFIG)
    kind = description.get("model_kind") if isinstance(description, dict) else None
    if kind not in circuit_tracer.KINDS:
        known = " or ".join(map(repr, circuit_tracer.KINDS))
        raise BadInputError(f"{folder / CONFIG}: model_kind is {kind!r}, not {known}")
    return description


def _hooks_of(folder: Path, description: Mapping[str, Any], note: Note | None) -> tuple[str, str]:
    is_other = note is not None and note.format == _OTHER_HOOKS
    return HOOKS if is_other else circuit_tracer.hooks(folder / CONFIG, description)


def _noted(folder: Path, description: Mapping[str, Any]) -> Note | None:
    """The note of a folder, or None where it comes from elsewhere."""
    if not (folder / NOTE).is_file():
        return None
    return _note(folder / NOTE, circuit_tracer.layers(folder, description))


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
