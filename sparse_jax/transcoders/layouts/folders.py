"""Which layout a folder has, and the transcoder that it holds.

A folder with a config.yaml is circuit-tracer's. Its list `transcoders` may name a file or a folder
of each layer, in this folder or on the hub (hf://owner/repository/path?revision=name), of any
layout that has one for each layer. Other folders are known by the names of their files; those that
have several transcoders of a layer must say which in such a list.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.weights import hub
from sparse_jax.transcoders.layouts import circuit_tracer, clt_forge, gemma_scope, saelens, sparsify
from sparse_jax.transcoders.layouts import tensors as files
from sparse_jax.transcoders.layouts.layer import Layer, joined
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig

HUB = "hf://"


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
        L = circuit_tracer.layers(folder, description)
        return circuit_tracer.cross_layer(folder, L, cfg, hooks)
    k = circuit_tracer.open_features(folder, description)
    layers = [_item(place, k, hooks) for place in places(folder, description)]
    transcoder, _ = joined(layers, window=1)
    own = transcoder.cfg
    if cfg is None:
        return Transcoder(transcoder.params, own, hooks)
    sizes = cfg.num_layers, cfg.hidden_size, cfg.features, cfg.kind in ("relu", "topk"), cfg.k
    if sizes != (own.num_layers, own.hidden_size, own.features, not own.has_thresholds, own.k):
        raise CorruptError(
            f"{folder}: transcoder.json has other sizes than the tensors; copy the whole folder"
        )
    return Transcoder(transcoder.params, cfg, hooks)


def places(folder: Path, description: Mapping[str, Any]) -> list[Path]:
    """The file or folder of each layer of a set.

    Raises:
      BadInputError: one of the list is not here.
      CorruptError: a layer is missing.
    """
    listed = description.get("transcoders")
    if listed is None:
        count = circuit_tracer.layers(folder, description)
        return [folder / f"layer_{layer}.safetensors" for layer in range(count)]
    if not isinstance(listed, list) or not listed:
        raise BadInputError(
            f"{folder / 'config.yaml'}: transcoders must be a list with a path of each layer"
        )
    # An older form has a mapping of each.
    paths = [each.get("filepath") if isinstance(each, dict) else each for each in listed]
    return [_place(folder, str(path)) for path in paths]


def _place(folder: Path, path: str) -> Path:
    if path.startswith(HUB):
        return _on_hub(folder, path)
    place = folder / path
    if folder.resolve() not in place.resolve().parents:
        raise BadInputError(
            f"{folder / 'config.yaml'}: {path} is not within {folder}; copy it there"
        )
    if not place.exists():
        raise BadInputError(f"{folder / 'config.yaml'}: {path} is not in {folder}; copy it there")
    return place


def _on_hub(folder: Path, path: str) -> Path:
    """The file of a list in the hub's cache, downloaded where that is allowed."""
    name, _, query = path.removeprefix(HUB).partition("?")
    owner, repository, *parts = name.split("/")
    revision = query.removeprefix("revision=") or None
    found = hub.file(f"{owner}/{repository}", "/".join(parts), revision)
    if found is None:
        command = f"hf download {owner}/{repository} {'/'.join(parts)}"
        command += f" --revision {revision}" if revision else ""
        raise BadInputError(
            f"{folder / 'config.yaml'}: {path} is not in the cache of the hub; add --download, or "
            f"run {command}"
        )
    return found


def _item(place: Path, k: int, hooks: tuple[str, str]) -> Layer:
    """The layer of a file or folder, by its names."""
    if place.is_dir():
        if (place / saelens.WEIGHTS).is_file():
            return saelens.layer(place)[1]
        if (place / sparsify.WEIGHTS).is_file():
            return sparsify.layer(place)[1]
        raise BadInputError(
            f"{place} holds no transcoder ({saelens.WEIGHTS} or {sparsify.WEIGHTS}); name a folder "
            "or file that does"
        )
    if place.suffix == ".npz":
        return gemma_scope.first_layer(place)
    if "w_enc" in files.names(place):
        return gemma_scope.second_layer(place)
    return circuit_tracer.set_layer(place, k, hooks)


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
        return joined(clt_forge.layers(folder), window=None)
    if _has_cross_layer(folder):
        return joined(gemma_scope.cross_layer(folder), window=None)
    by_layer: dict[int, list[tuple[Path, Layer]]] = {}
    for place in _found(folder):
        number, layer = _numbered(folder, place)
        by_layer.setdefault(number, []).append((place, layer))
    for number, found in sorted(by_layer.items()):
        if len(found) > 1:
            names = ", ".join(str(place.relative_to(folder)) for place, _ in found[:4])
            raise BadInputError(
                f"{folder}: layer {number} has {len(found)} transcoders ({names}); copy one of "
                "each layer into a folder, or name them in a config.yaml (docs/sparse/dictionaries)"
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
        return [file for file in folder.iterdir() if gemma_scope.CROSS_LAYER.fullmatch(file.name)]
    found = []
    for place in _found(folder):
        name = saelens.WEIGHTS if (place / saelens.WEIGHTS).is_file() else sparsify.WEIGHTS
        found.append(place / name if place.is_dir() else place)
    return found


def setting_files(folder: Path) -> list[Path]:
    """The files with the settings of a folder without config.yaml."""
    if (folder / clt_forge.CONFIG).is_file():
        return [folder / clt_forge.CONFIG]
    if _has_cross_layer(folder):
        return []
    return [place / saelens.CONFIG for place in _found(folder) if place.is_dir()]


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


def _numbered(folder: Path, place: Path) -> tuple[int, Layer]:
    """The number and the layer of a file or folder of `_found`."""
    if place.is_dir():
        is_first = (place / saelens.WEIGHTS).is_file()
        return saelens.layer(place) if is_first else sparsify.layer(place)
    matches = map(gemma_scope.FOLDER.fullmatch, reversed(place.absolute().parent.parts))
    number = next((int(match[1]) for match in matches if match), None)
    if number is None:
        raise BadInputError(
            f"{place} is in no folder layer_<number>, so that its layer is not known; keep the "
            "names of the release"
        )
    first = place.name == gemma_scope.FIRST
    return number, gemma_scope.first_layer(place) if first else gemma_scope.second_layer(place)
