"""Low-rank adapters in the layout of PEFT (Mangrulkar et al., 2022): a folder, read and written.

    adapter_config.json          rank r, strength alpha, the adapted modules
    adapter_model.safetensors    base_model.model.<module>.lora_A.weight [r, in], lora_B [out, r]

PEFT adds (alpha / r) B A to the matrix [out, in] of a module, and its transpose where the matrix is
stored [in, out], as GPT-2's are. Our adapters (`model.lora`) hold `down` [L, in, r] and `up`
[L, r, out] of each weight, in and out with the axes of that weight.

The family's table says which module fills which weights, and in what order of rows and columns: it
is given the indices of rows and columns to read in place of a matrix. A module that holds several
weights (GPT-2's c_attn) shares its A between them; on writing, weights whose `down` differ are set
beside each other in one A of a larger rank, which `rank_pattern` and `alpha_pattern` then name.
"""

from collections.abc import Mapping
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model import decoder
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.model.lora import LoraConfig, adapter_spec
from lm_jax.model.params import ParamTree
from lm_jax.run.files import new_folder
from lm_jax.run.identity import difference
from lm_jax.weights import hub
from lm_jax.weights.families import FAMILIES
from lm_jax.weights.families.table import Entry
from lm_jax.weights.peft_settings import CONFIG, Settings, read_settings
from lm_jax.weights.pretrained import Pretrained
from lm_jax.weights.safetensors import open_tensors, readable, shortened, write_tensors

WEIGHTS = "adapter_model.safetensors"
_PICKLE = "adapter_model.bin"
_DIGEST = "base_sha256"


@dataclasses.dataclass(frozen=True, eq=False)
class _Module:
    """A module that PEFT can adapt; `{l}` in its name stands for the layer.

    `layers` have it. `weights` gives, by path, the column of A of each input and the row of B of
    each output.
    """

    name: str
    inputs: int
    outputs: int
    transposed: bool
    layers: range
    weights: Mapping[str, tuple[np.ndarray, np.ndarray]]

    def in_layer(self, layer: int) -> str:
        """The module's name in one layer."""
        return self.name.replace("{l}", str(layer))

    def tensors(self, layer: int) -> tuple[str, str]:
        """The names of its A and B in one layer."""
        name = f"base_model.model.{self.in_layer(layer)}"
        return f"{name}.lora_A.weight", f"{name}.lora_B.weight"


def _modules(cfg: DecoderConfig) -> list[_Module]:
    """Every module of the family that holds weights which `model.lora` adapts."""
    spec = _spec(cfg, 1)
    modules = (
        _module(
            entry,
            {path: len(spec[f"{path}/down"]) - 2 for path in entry.params},
            range(cfg.num_layers) if entry.layers is None else entry.layers,
        )
        for entry in FAMILIES[cfg.family].entries(cfg)
        if all(f"{path}/down" in spec for path in entry.params)
    )
    return [module for module in modules if module is not None]


def _spec(cfg: DecoderConfig, rank: int) -> dict[str, tuple[int, ...]]:
    """The shapes of `down` and `up` of every weight that can be adapted."""
    spec = adapter_spec(decoder.param_spec(cfg), LoraConfig(rank=rank))
    return {path: leaf.shape for path, leaf in params_lib.leaves(spec)}


def _module(entry: Entry, input_axes: Mapping[str, int], layers: range) -> _Module | None:
    """The module of an entry; None where its weights are not made of whole rows and columns."""
    at = [np.broadcast_to(axis, entry.shape) for axis in np.indices(entry.shape, sparse=True)]
    (rows, columns), weights, layouts = (entry.read(axis) for axis in at), {}, set()
    for path, row, column in zip(entry.params, rows, columns, strict=True):
        inputs = math.prod(row.shape[: input_axes[path]])
        row_IO, column_IO = row.reshape(inputs, -1), column.reshape(inputs, -1)
        straight = (row_IO == row_IO[:1]).all() and (column_IO == column_IO[:, :1]).all()
        turned = (row_IO == row_IO[:, :1]).all() and (column_IO == column_IO[:1]).all()
        if not straight and not turned:
            return None
        layouts.add(not straight)
        weights[path] = (column_IO[:, 0], row_IO[0]) if straight else (row_IO[:, 0], column_IO[0])
    (transposed,) = layouts
    inputs, outputs = entry.shape if transposed else entry.shape[::-1]
    name = entry.name.removesuffix(".weight")
    return _Module(name, inputs, outputs, bool(transposed), layers, weights)


def load_peft(folder: str | Path, base: Pretrained) -> tuple[dict[str, Any], LoraConfig]:
    """Reads a PEFT folder as adapters of `base`, for `lora.attach` or `lora.merge`.

    Layers that it does not adapt, and modules of a lower rank than the highest, are filled up with
    zeros; a strength that differs from the common one is multiplied into `up`.

    Raises:
      BadInputError: it is no PEFT folder of LoRA adapters, a setting is not supported, it was made
        for another base, or tensors are missing, unknown, misshapen or not finite (all at once).
    """
    folder, cfg = Path(folder), base.cfg
    if not (folder / WEIGHTS).is_file() and (folder / _PICKLE).exists():
        raise BadInputError(
            f"{folder / _PICKLE} is pickled, which is never loaded, as loading can run code; where "
            "you trust it, save the adapter again with a PEFT that writes safetensors"
        )
    settings = read_settings(folder / CONFIG)
    tensors, recorded = _read_tensors(folder / WEIGHTS)
    _check_base(folder, settings, recorded, base)
    chosen = {
        (module, layer): settings.of_module(module.in_layer(layer))
        for module in _modules(cfg)
        for layer in module.layers
        if settings.adapts(module.in_layer(layer), layer)
    }
    wanted = {
        name: shape
        for (module, layer), (r, _) in chosen.items()
        for name, shape in zip(
            module.tensors(layer), ((r, module.inputs), (module.outputs, r)), strict=True
        )
    }
    _check_tensors(folder, wanted, tensors)
    rank = max(r for r, _ in chosen.values())
    spec = _spec(cfg, rank)
    paths = [path for module in dict.fromkeys(m for m, _ in chosen) for path in module.weights]
    leaves = {
        f"{path}/{name}": np.zeros(spec[f"{path}/{name}"], np.float32)
        for path, name in itertools.product(paths, ("down", "up"))
    }
    for (module, layer), (r, strength) in chosen.items():
        a_RI, b_OR = (tensors[name].astype(np.float32) for name in module.tensors(layer))
        if strength != settings.strength:
            b_OR = b_OR * np.float32(strength / settings.strength)
        for path, (columns, rows) in module.weights.items():
            at = layer - module.layers.start
            down, up = leaves[f"{path}/down"][at], leaves[f"{path}/up"][at]
            down[..., :r] = a_RI.T[columns].reshape(*down.shape[:-1], r)
            up[:r] = b_OR[rows].T.reshape(r, *up.shape[1:])
    targets = tuple(path.removeprefix("blocks/") for path in paths)
    ours = LoraConfig(rank=rank, alpha=settings.strength * rank, targets=targets)
    return params_lib.tree_from_paths(leaves), ours


def save_peft(
    folder: str | Path,
    base: Pretrained,
    adapters: ParamTree,
    settings: LoraConfig,
    *,
    name: str | None = None,
) -> None:
    """Writes adapters of `base` as a new PEFT folder, float32.

    A snapshot of the hub is named as the base, with its commit, and any other as `name` says; the
    digest of any base is stored beside the tensors, where `load_peft` looks for it.

    Raises:
      BadInputError: the folder exists, or the family has no module of the adapted weights.
      StorageError: it cannot be written.
    """
    leaves = {path: np.asarray(a, np.float32) for path, a in params_lib.by_path(adapters).items()}
    adapted = {path.rpartition("/")[0] for path in leaves}
    modules = [module for module in _modules(base.cfg) if adapted & module.weights.keys()]
    if lost := adapted.difference(*(module.weights for module in modules)):
        raise BadInputError(
            f"{', '.join(sorted(lost))}: family {base.cfg.family} has no module of these weights "
            "that PEFT could adapt; leave them out of the adapter's targets"
        )
    tensors: dict[str, np.ndarray] = {}
    ranks: dict[str, int] = {}
    targets = [module.name.rpartition("{l}.")[2] for module in modules]
    for module, target in zip(modules, targets, strict=True):
        a_LRI, b_LOR = _joined(module, leaves, settings.rank)
        if a_LRI.shape[1] != settings.rank:
            ranks[target] = a_LRI.shape[1]
        for layer, *pair in zip(module.layers, a_LRI, b_LOR, strict=True):
            tensors |= zip(module.tensors(layer), pair, strict=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": hub.repository(base.files[0].parent) or name,
        "revision": base.revision,
        "inference_mode": True,
        "r": settings.rank,
        "lora_alpha": _number(settings.alpha),
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": any(module.transposed for module in modules),
        "target_modules": list(dict.fromkeys(targets)),
        "rank_pattern": ranks,
        "alpha_pattern": {target: _number(settings.strength * r) for target, r in ranks.items()},
    }
    with new_folder(folder) as draft:
        (draft / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        write_tensors(draft / WEIGHTS, tensors, {"format": "pt", _DIGEST: base.identity.text})


def _joined(
    module: _Module, leaves: Mapping[str, np.ndarray], rank: int
) -> tuple[np.ndarray, np.ndarray]:
    """A [L, R, I] and B [L, O, R] of a module; R is a multiple of the rank of its weights."""
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for path, (columns, rows) in module.weights.items():
        if f"{path}/down" not in leaves:
            continue
        down, up = leaves[f"{path}/down"], leaves[f"{path}/up"]
        a_LRI = np.zeros((len(down), rank, module.inputs), np.float32)
        a_LRI[:, :, columns] = down.reshape(len(down), -1, rank).swapaxes(1, 2)
        b_LOR = next((b for a, b in parts if np.array_equal(a, a_LRI)), None)
        if b_LOR is None:
            b_LOR = np.zeros((len(up), module.outputs, rank), np.float32)
            parts.append((a_LRI, b_LOR))
        b_LOR[:, rows] = up.reshape(len(up), rank, -1).swapaxes(1, 2)
    return np.concatenate([a for a, _ in parts], 1), np.concatenate([b for _, b in parts], 2)


def _number(value: float) -> float:
    """The number as PEFT writes it: whole numbers without a fraction."""
    return int(value) if float(value).is_integer() else value


def _read_tensors(path: Path) -> tuple[dict[str, np.ndarray], str | None]:
    """All tensors, and the digest of their base where `save_peft` wrote them."""
    if not path.is_file():
        raise BadInputError(f"{path} is not there; name the folder of a PEFT adapter")
    file = open_tensors(path)
    with readable(path):
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return tensors, (file.metadata() or {}).get(_DIGEST)


def _check_base(folder: Path, settings: Settings, recorded: str | None, base: Pretrained) -> None:
    """Refuses another base, as far as both sides say which they are."""
    field, name = "base_model_name_or_path", settings.base_model_name_or_path
    ours = hub.repository(base.files[0].parent) if base.files else None
    if name and ours and hub.NAME.fullmatch(name) and name.lower() != ours.lower():
        raise BadInputError(
            f"{folder / CONFIG}: {field} = {name!r}, but the base is {ours!r}; load it over the "
            f"weights it was trained on, or mend {field} if they are the same"
        )
    file = folder / WEIGHTS
    if recorded and (change := difference(recorded, base.identity.text, where=file)):
        raise BadInputError(
            f"{file} was trained on a base with {change}; load it over the model it was trained on"
        )


def _check_tensors(
    folder: Path, wanted: Mapping[str, tuple[int, int]], tensors: Mapping[str, np.ndarray]
) -> None:
    problems = [] if wanted else ["target_modules name no matrix in the blocks of the base"]
    problems += [f"missing {name}" for name in wanted if name not in tensors]
    problems += [f"unknown {name} {a.shape}" for name, a in tensors.items() if name not in wanted]
    both = [name for name in wanted if name in tensors]
    problems += [
        f"{name} has shape {tensors[name].shape}, not {wanted[name]}"
        for name in both
        if tensors[name].shape != wanted[name]
    ]
    problems += [
        f"NaN or infinite numbers in {name}"
        for name in both
        if not np.isfinite(tensors[name].astype(np.float32)).all()
    ]
    if problems:
        raise BadInputError(
            f"{folder} does not fit its settings or the base ({len(problems)} differences): "
            f"{shortened(problems)}; take the adapter of this model, over its blocks' matrices only"
        )
