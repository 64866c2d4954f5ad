"""Saving a model as a Hugging Face folder."""

from collections.abc import Mapping
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError, nearest
from lm_jax.model import decoder
from lm_jax.model import params as params_lib
from lm_jax.model.config import DecoderConfig
from lm_jax.run.config import config_difference, to_plain
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.families import FAMILIES, table


def save_pretrained(
    path: str | Path,
    cfg: DecoderConfig,
    params: Mapping[str, Any],
    tokenizer: Tokenizer | None = None,
) -> None:
    """Writes a folder that `transformers` loads: config.json, model.safetensors, tokenizer.

    Where the tokenizer has several `stop_ids`, generation_config.json lists them, so that
    `transformers` ends a text at each of them too.

    The folder is written under a temporary name, read back, compared, synced and renamed.

    Raises:
      BadInputError: if `path` exists, the parameters do not fit `cfg`, or its family has no place
        for a setting of `cfg`.
      StorageError: if it cannot be written.
    """
    from lm_jax.weights.safetensors import write_folder

    params_lib.check(params, decoder.param_spec(cfg))
    if cfg.family not in FAMILIES:
        raise BadInputError(f"cfg.family = {cfg.family!r}{nearest(cfg.family, FAMILIES)}")
    family = FAMILIES[cfg.family]
    leaves = params_lib.by_path(params)
    named = {"model_type": family.name, "architectures": [family.architecture]}
    config = named | family.write_config(cfg) | {"dtype": str(next(iter(leaves.values())).dtype)}
    if tokenizer is not None:
        config |= {"bos_token_id": tokenizer.bos_id, "eos_token_id": tokenizer.eos_id}
    _check_stored(cfg, family, config)

    entries = family.entries(cfg)
    wanted = {name: e.shape for e in entries for name in table.names(e, cfg.num_layers)}
    table.check(entries, cfg, wanted)
    tensors: dict[str, np.ndarray] = {}
    for entry in entries:
        stacks = [np.asarray(leaves[p]) for p in entry.params]
        for layer, names in enumerate(table.names_by_layer(entry, cfg.num_layers)):
            stored = entry.write(*([a[layer] for a in stacks] if entry.per_layer else stacks))
            tensors |= zip(names, [stored] if entry.heads is None else stored, strict=True)
    write_folder(Path(path), config, tensors, tokenizer)


def _check_stored(cfg: DecoderConfig, family: table.Family, config: Mapping[str, Any]) -> None:
    """Raises if the config, read back as a load would, is another decoder."""
    from lm_jax.weights.compat import transformers

    back = family.read_config(transformers().AutoConfig.for_model(**config))

    def spelt_out(c: DecoderConfig) -> dict[str, Any]:
        local = c.local_rope if any(c.layer_windows) else None
        explicit = {"attention_scale": c.scale, "windows": c.layer_windows, "local_rope": local}
        return to_plain(dataclasses.replace(c, **explicit))

    if lost := config_difference(spelt_out(back), spelt_out(cfg)):
        raise BadInputError(
            f"a folder of family {family.name} cannot hold this config: {'; '.join(lost)}; "
            "set the field to the stored value, or save with lm_jax.checkpoint"
        )
