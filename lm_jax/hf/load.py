"""Pretrained weights in and out: Hugging Face folders, GGUF files, manifest names.

1. Read the config and find the family (`FAMILIES`).
2. List the checkpoint's tensors, shapes only, and check them against the family's table: one
   error names every difference. Nothing is ever filled with random values.
3. Read one tensor at a time, turn it to our layout, and write it into its place of the stacked,
   already sharded parameter: at no time is more than one tensor held beside the parameters.
"""

from collections.abc import Mapping
import dataclasses
import functools
import hashlib
import json
from pathlib import Path
import re
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax import decoder
from lm_jax import params as params_lib
from lm_jax.config import DecoderConfig
from lm_jax.errors import BadInputError, nearest
from lm_jax.hf import table
from lm_jax.hf.gemma import GEMMA3
from lm_jax.hf.gpt2 import GPT2
from lm_jax.hf.gpt_neox import GPT_NEOX
from lm_jax.hf.llama import LLAMA
from lm_jax.hf.tokenizer import Tokenizer

FAMILIES: Mapping[str, table.Family] = {f.name: f for f in (LLAMA, GPT2, GPT_NEOX, GEMMA3)}


class Source(Protocol):
    """Where tensors come from: names as the family's table has them, shapes, and a reader."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of every stored tensor."""
        ...

    def read(self, name: str) -> np.ndarray:
        """One tensor, whole."""
        ...


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A model as loaded; `tokenizer` is None where the folder has none. `files` hold the weights."""

    cfg: DecoderConfig
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    files: tuple[Path, ...]

    @functools.cached_property
    def sha256(self) -> str:
        """Digest over the weight files, in order of their names."""
        total = hashlib.sha256()
        for path in sorted(self.files):
            with path.open("rb") as file:
                total.update(hashlib.file_digest(file, "sha256").digest())
        return total.hexdigest()


def load_pretrained(
    source: str | Path,
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
) -> Pretrained:
    """Loads a model.

    Args:
      source: a Hugging Face folder, a `.gguf` file, or a name of the manifest (`assets.py`).
      dtype: of the parameters, float32 or bfloat16.
      mesh: where to put them, sharded by `sharding.RULES`; None is the default device.

    Raises:
      BadInputError: if there is no such source, its family or a setting is not supported, or any
        tensor is missing, unused, misshapen or not finite (all listed at once).
    """
    path = resolve(source)
    if path.is_file() and path.suffix == ".gguf":
        from lm_jax.hf.gguf import GGUFSource

        gguf = GGUFSource(path)
        cfg, family, tokenizer = gguf.config(), FAMILIES[gguf.family], gguf.tokenizer()
        weights: Source = gguf
        files = (path,)
    elif path.is_dir():
        from lm_jax.hf.folder import SafetensorsSource, read_hf_config

        hf_config = read_hf_config(path, FAMILIES)
        family = FAMILIES[hf_config.model_type]
        cfg = family.read_config(hf_config)
        folder = SafetensorsSource(path, family)
        weights, files = folder, folder.files
        tokenizer = Tokenizer.from_folder(path) if (path / "tokenizer.json").exists() else None
    else:
        raise BadInputError(f"{path} is neither a Hugging Face folder nor a .gguf file")
    if tokenizer is not None and tokenizer.vocab_size > cfg.vocab_size:
        raise BadInputError(
            f"{path}: the tokenizer has {tokenizer.vocab_size} tokens but the embedding only "
            f"{cfg.vocab_size} rows; use the tokenizer that belongs to these weights"
        )
    params = load_params(weights, cfg, family, dtype=dtype, mesh=mesh)
    return Pretrained(cfg, params, tokenizer, tuple(files))


def resolve(source: str | Path) -> Path:
    """A path as it is; a manifest name as the file or folder it was fetched to."""
    path = Path(source)
    if path.exists():
        return path
    from lm_jax import assets

    known = assets.models()
    if str(source) in known:
        return assets.path(str(source), known[str(source)])
    raise BadInputError(
        f"model {str(source)!r}: no such file or folder, and no such name in the manifest"
        f"{nearest(str(source), known)}"
    )


def load_params(
    source: Source,
    cfg: DecoderConfig,
    family: table.Family,
    *,
    dtype: Any = jnp.float32,
    mesh: jax.sharding.Mesh | None = None,
) -> dict[str, Any]:
    """Fills the parameters of `cfg` from a source; see `load_pretrained` for what it raises."""
    shapes, entries = source.shapes(), family.entries(cfg)
    shapes = _without_tied_head(source, shapes, cfg, family)
    ignored = re.compile("|".join(family.ignored) or r"(?!)")
    table.check(entries, cfg, shapes, lambda name: ignored.fullmatch(name) is not None)

    spec = decoder.param_spec(cfg)
    specs = dict(params_lib.leaves(spec))
    shardings = _shardings(spec, mesh)
    filled: dict[str, jax.Array] = {}
    bad: list[str] = []
    for entry in entries:
        for layer, name in enumerate(table.names(entry, cfg.num_layers)):
            tensor = source.read(name)
            if not np.isfinite(tensor).all():
                bad.append(name)
            for path, value in zip(entry.params, entry.read(tensor), strict=True):
                value = np.ascontiguousarray(value).astype(dtype, copy=False)
                if not entry.per_layer:
                    filled[path] = jax.device_put(value, shardings[path])
                    continue
                if layer == 0:
                    filled[path] = _zeros(specs[path].shape, dtype, shardings[path])
                filled[path] = _write_layer(filled[path], value, layer)
    if bad:
        raise BadInputError(f"checkpoint has NaN or infinite weights in: {', '.join(bad)}")
    return params_lib.tree_from_paths(filled)


def _without_tied_head(source, shapes, cfg, family):
    """Drops a stored copy of the tied embedding, once seen to be equal to it."""
    if not cfg.tie_embeddings or family.head not in shapes:
        return shapes
    embedding = next(e.name for e in family.entries(cfg) if e.params == ("embed/tokens",))
    if shapes[family.head] != shapes.get(embedding) or not np.array_equal(
        source.read(family.head), source.read(embedding)
    ):
        raise BadInputError(
            f"config.json says tie_word_embeddings, but {family.head} differs from {embedding}; "
            "set tie_word_embeddings to false"
        )
    return {name: shape for name, shape in shapes.items() if name != family.head}


def _shardings(spec, mesh):
    if mesh is None:
        return {name: None for name, _ in params_lib.leaves(spec)}
    from lm_jax import sharding

    return {name: sharding.named(mesh, leaf) for name, leaf in params_lib.leaves(spec)}


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _filled_with_zeros(shape, dtype, sharding):
    zeros = jnp.zeros(shape, dtype)
    return zeros if sharding is None else jax.lax.with_sharding_constraint(zeros, sharding)


def _zeros(shape, dtype, sharding):
    return _filled_with_zeros(shape, jnp.dtype(dtype), sharding)


@functools.partial(jax.jit, donate_argnums=0)
def _write_layer(stack, value, layer):
    return jax.lax.dynamic_update_index_in_dim(stack, value, layer, 0)


def save_pretrained(
    path: str | Path,
    cfg: DecoderConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a folder that `transformers` loads: config.json, model.safetensors, tokenizer.

    The folder is written under a temporary name, read back, compared, and renamed.

    Raises:
      BadInputError: if `path` exists, or the parameters do not fit `cfg`.
      StorageError: if it cannot be written.
    """
    from lm_jax.hf.folder import write_folder

    params_lib.check(params, decoder.param_spec(cfg))
    if cfg.family not in FAMILIES:
        raise BadInputError(f"cfg.family = {cfg.family!r}{nearest(cfg.family, FAMILIES)}")
    family = FAMILIES[cfg.family]
    leaves = params_lib.by_path(params)
    tensors: dict[str, np.ndarray] = {}
    for entry in family.entries(cfg):
        stacks = [np.asarray(leaves[p]) for p in entry.params]
        for layer, name in enumerate(table.names(entry, cfg.num_layers)):
            parts = [a[layer] for a in stacks] if entry.per_layer else stacks
            # The writer takes the buffer as it lies: a transposed view would be stored wrongly.
            tensors[name] = np.ascontiguousarray(entry.write(*parts))
    dtype = str(next(iter(leaves.values())).dtype)
    config = family.write_config(cfg) | {"dtype": dtype}
    write_folder(Path(path), json.dumps(config, indent=2), tensors, tokenizer)
