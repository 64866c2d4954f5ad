"""Which layout a folder has, and the transcoder that it holds.

A folder with a config.yaml is circuit-tracer's. Its list `transcoders` may name a file or a folder
of each layer, in this folder or on the hub (hf://owner/repository/path?revision=name), of any
layout that has one for each layer. Other folders are known by the names of their files; those that
have several transcoders of a layer must say which in such a list.
"""

from collections.abc import Mapping
import os
from pathlib import Path
from typing import Any

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.weights import hub
from sparse_jax.transcoders.layouts import circuit_tracer, clt_forge, gemma_scope, saelens, sparsify
from sparse_jax.transcoders.layouts import tensors as files
from sparse_jax.transcoders.layouts.layer import Layer, joined
from sparse_jax.transcoders.transcoder import HOOKS, Transcoder, TranscoderConfig

CONFIG, HUB = "config.yaml", "hf://"
# What is read of a repository of the hub: no pickles.
PATTERNS = ("*.safetensors", "*params.npz", "*config.yaml", "*config.json", "*cfg.json")


def read_described(
    folder: Path,
    description: Mapping[str, Any],
    cfg: TranscoderConfig | None,
    hooks: tuple[str, str],
) -> Transcoder:
    """The transcoder of a folder with config.yaml.

    Args:
      folder: folder with config.yaml.
      description: content of config.yaml.
      cfg: configuration that is known; None for what the tensors say.
      hooks: names of inputs and outputs.

    Raises:
      BadInputError: a tensor has no part in a transcoder, or a file of the list is not here.
      CorruptError: a tensor is missing, of another shape or not finite.
    """
    if description["model_kind"] == circuit_tracer.CROSS_LAYER:
        if "transcoders" in description:
            layers = gemma_scope.cross_layer(places(folder, description))
            return _with_hooks(joined(layers, window=None)[0], folder, hooks)
        L = circuit_tracer.layers(folder, description)
        return circuit_tracer.cross_layer(folder, L, cfg, hooks)
    k = circuit_tracer.open_features(folder, description)
    layers = []
    for number, place in enumerate(places(folder, description)):
        own, layer = _item(place, k, hooks)
        if own not in (None, number):
            raise BadInputError(
                f"{folder / CONFIG}: {place} is of layer {own}, and stands at {number} of "
                "transcoders; list the layers in order"
            )
        layers.append(layer)
    transcoder = _with_hooks(joined(layers, window=1)[0], folder, hooks)
    own = transcoder.cfg
    if description.get("activation") == "jumprelu" and not own.has_thresholds:
        raise BadInputError(
            f"{folder / CONFIG}: activation is jumprelu, and the files have no thresholds; copy "
            "the whole folder"
        )
    if cfg is None:
        return transcoder
    sizes = cfg.num_layers, cfg.hidden_size, cfg.features, cfg.kind in ("relu", "topk"), cfg.k
    if sizes != (own.num_layers, own.hidden_size, own.features, not own.has_thresholds, own.k):
        raise CorruptError(
            f"{folder}: transcoder.json has other sizes than the tensors; copy the whole folder"
        )
    return Transcoder(transcoder.params, cfg, hooks)


def _with_hooks(transcoder: Transcoder, folder: Path, hooks: tuple[str, str]) -> Transcoder:
    """The transcoder, where its files do not say that it is of other places."""
    if transcoder.hooks != hooks:
        raise BadInputError(
            f"{folder / CONFIG}: its hooks are {' and '.join(hooks)}, and those of its files "
            f"{' and '.join(transcoder.hooks)}; write these"
        )
    return transcoder


def places(folder: Path, description: Mapping[str, Any]) -> list[Path]:
    """The file or folder of each layer of a set.

    Raises:
      BadInputError: one of the list is not here.
      CorruptError: a layer is missing.
    """
    if "transcoders" not in description:
        count = circuit_tracer.layers(folder, description)
        return [folder / f"layer_{layer}.safetensors" for layer in range(count)]
    return [_place(folder, path) for path in listed(folder, description)]


def listed(folder: Path, description: Mapping[str, Any]) -> list[str]:
    """The paths in the list of a config.yaml, from the first layer on.

    Raises:
      BadInputError: it is no list of paths, or its layers are not in order.
    """
    items = description["transcoders"]
    paths = []
    for number, item in enumerate(items if isinstance(items, list) else ()):
        # An older form has a mapping for each layer.
        path = item.get("filepath") if isinstance(item, dict) else item
        layer = item.get("layer", number) if isinstance(item, dict) else number
        if layer != number:
            raise BadInputError(
                f"{folder / CONFIG}: item {number} of transcoders is of layer {layer}; list the "
                "layers in order"
            )
        if isinstance(path, str):
            paths.append(path)
    if not paths or not isinstance(items, list) or len(paths) < len(items):
        raise BadInputError(
            f"{folder / CONFIG}: transcoders must be a list with a path of each layer (filepath in "
            "the older form)"
        )
    return paths


def _place(folder: Path, path: str) -> Path:
    if path.startswith(HUB):
        return _on_hub(folder, path)
    # As it is spelled: files in the hub's cache are links to others.
    place = Path(os.path.normpath(folder / path))
    if Path(os.path.normpath(folder)) not in place.parents:
        raise BadInputError(f"{folder / CONFIG}: {path} is not within {folder}; copy it there")
    if not place.exists():
        raise BadInputError(f"{folder / CONFIG}: {path} is not in {folder}; copy it there")
    return place


def _on_hub(folder: Path, path: str) -> Path:
    """The file or folder of a list in the hub's cache, downloaded where that is allowed."""
    name, _, query = path.removeprefix(HUB).partition("?")
    revision = query.removeprefix("revision=")
    whole = f"{name}@{revision}" if revision else name
    match = hub.PART.fullmatch(whole)
    if match is None or not match[2]:
        raise BadInputError(
            f"{folder / CONFIG}: {path} is not hf://OWNER/REPOSITORY/PATH, with ?revision=NAME or "
            "without; write it so"
        )
    inner = match[2].removeprefix("/")
    if Path(inner).suffix in (".npz", ".safetensors"):
        found = hub.file(match[1], inner, revision or None)
    else:
        found = hub.part(whole, PATTERNS)
    if found is None:
        command = f"hf download {match[1]} {inner}" + (
            f" --revision {revision}" if revision else ""
        )
        raise BadInputError(
            f"{folder / CONFIG}: {path} is not in the cache of the hub; add --download, or run "
            f"{command}"
        )
    return found


def _item(place: Path, k: int, hooks: tuple[str, str]) -> tuple[int | None, Layer]:
    """The layer of a file or folder, by its names, and its number where it says it."""
    if place.is_dir():
        if (place / saelens.WEIGHTS).is_file():
            return saelens.layer(place)
        if (place / sparsify.WEIGHTS).is_file():
            return sparsify.layer(place)
        raise BadInputError(
            f"{place} holds no transcoder ({saelens.WEIGHTS} or {sparsify.WEIGHTS}); name a folder "
            "or file that does"
        )
    if place.suffix == ".npz":
        return _number(place), gemma_scope.first_layer(place)
    if "w_enc" in files.names(place):
        return _number(place), gemma_scope.second_layer(place)
    return None, circuit_tracer.set_layer(place, k, hooks)


def _number(file: Path) -> int | None:
    """The layer of a file of Gemma Scope, by the names of its folders."""
    matches = map(gemma_scope.FOLDER.fullmatch, reversed(file.absolute().parent.parts))
    return next((int(match[1]) for match in matches if match), None)


def is_known(folder: Path) -> bool:
    """Whether a folder without config.yaml has a layout that is read."""
    whole = (folder / clt_forge.CONFIG).is_file() or _has_cross_layer(folder)
    return whole or bool(_found(folder))


def read_other(folder: Path) -> tuple[Transcoder, str]:
    """The transcoder of a folder without config.yaml, and the name of its model.

    Raises:
      BadInputError: a layer has several transcoders or none, or it holds no transcoder of MLPs.
      CorruptError: a file is damaged.
    """
    if (folder / clt_forge.CONFIG).is_file():
        layers, window = clt_forge.layers(folder)
        return joined(layers, window=window)
    if _has_cross_layer(folder):
        found = gemma_scope.cross_layer_files(folder)
        return joined(gemma_scope.cross_layer(found), window=None)
    by_layer: dict[int, list[tuple[Path, Layer]]] = {}
    for place in _found(folder):
        number, layer = _numbered(place)
        by_layer.setdefault(number, []).append((place, layer))
    for number, found in sorted(by_layer.items()):
        if len(found) > 1:
            names = ", ".join(str(place.relative_to(folder)) for place, _ in found[:4])
            raise BadInputError(
                f"{folder}: layer {number} has {len(found)} transcoders ({names}); copy one of "
                "each layer into a folder, or list them in a config.yaml "
                "(docs/sparse/dictionaries.md)"
            )
    if sorted(by_layer) != list(range(len(by_layer))):
        raise BadInputError(
            f"{folder} has transcoders of layers {sorted(by_layer)}, and a graph needs all from 0 "
            "on; add the others"
        )
    return joined([by_layer[number][0][1] for number in range(len(by_layer))], window=1)


def weight_files(folder: Path) -> list[Path]:
    """The files with the tensors of a folder without config.yaml."""
    if (folder / clt_forge.CONFIG).is_file():
        return [folder / clt_forge.WEIGHTS]
    if _has_cross_layer(folder):
        return gemma_scope.cross_layer_files(folder)
    found = []
    for place in _in_order(folder):
        name = saelens.WEIGHTS if (place / saelens.WEIGHTS).is_file() else sparsify.WEIGHTS
        found.append(place / name if place.is_dir() else place)
    return found


def setting_files(folder: Path) -> list[Path]:
    """The files with the settings of a folder without config.yaml."""
    if (folder / clt_forge.CONFIG).is_file():
        return [folder / clt_forge.CONFIG]
    if _has_cross_layer(folder):
        return []
    return [place / saelens.CONFIG for place in _in_order(folder) if place.is_dir()]


def _in_order(folder: Path) -> list[Path]:
    """Those of `_found` in the order of their layers, where that is known."""

    def key(place: Path) -> tuple[int, str]:
        if not place.is_dir():
            number = _number(place)
        elif (place / saelens.WEIGHTS).is_file():
            number = saelens.describe(place).place[0]
        else:
            match = sparsify.FOLDER.fullmatch(place.name)
            number = int(match[1]) if match else None
        return -1 if number is None else number, str(place)

    return sorted(_found(folder), key=key)


def _has_cross_layer(folder: Path) -> bool:
    return any(
        gemma_scope.CROSS_LAYER.fullmatch(file.name) for file in folder.glob("*.safetensors")
    )


def _found(folder: Path) -> list[Path]:
    """The file or folder of every transcoder below a folder."""
    found = [*folder.rglob(gemma_scope.FIRST), *folder.rglob(gemma_scope.SECOND)]
    for name in (saelens.WEIGHTS, sparsify.WEIGHTS):
        found += [file.parent for file in folder.rglob(name)]
    return sorted(found)


def _numbered(place: Path) -> tuple[int, Layer]:
    """The number and the layer of a file or folder of `_found`."""
    number, layer = _item(place, 0, HOOKS)
    if number is None:
        raise BadInputError(
            f"{place} is in no folder layer_<number>, so that its layer is not known; keep the "
            "names of the release"
        )
    return number, layer
