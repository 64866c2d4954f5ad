"""A folder of PEFT whose base is at hand, as a model: the adapters merged into the base.

The base is what `adapter_config.json` names: a name of `iaj fetch --list`, `ORG/NAME` of the
Hugging Face hub with its revision, or a folder. The tokenizer is the folder's own if it has one.
"""

from collections.abc import Callable
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.errors import BadInputError
from lm_jax.model import lora
from lm_jax.weights import hub
from lm_jax.weights.peft import WEIGHTS, load_peft
from lm_jax.weights.peft_settings import CONFIG, read_settings
from lm_jax.weights.pretrained import OpenedModel


def open_adapted(folder: Path, open_base: Callable[[str], OpenedModel]) -> OpenedModel:
    """Reads config and tokenizer of the base, as those of any model are.

    Args:
      folder: the folder, which has an `adapter_config.json`.
      open_base: function that opens the base by its name (`lm_jax.weights.load`).

    Raises:
      BadInputError: the folder names no base, or one that is not here or has gates; or a setting of
        the adapter is not supported.
    """
    settings = read_settings(folder / CONFIG)
    name = settings.base_model_name_or_path
    if not name:
        raise BadInputError(
            f"{folder / CONFIG} has no base_model_name_or_path; write there the model that the "
            "adapters were trained over: a name of iaj fetch --list, ORG/NAME or a folder"
        )
    if settings.revision and hub.NAME.fullmatch(name) and not Path(name).exists():
        name = f"{name}@{settings.revision}"
    try:
        base = open_base(name)
    except BadInputError as error:
        raise BadInputError(f"{folder} adapts a base that cannot be read: {error}") from error
    return dataclasses.replace(
        base,
        files=(*base.files, folder / WEIGHTS),
        read_params=functools.partial(_read, folder, base),
        revision=None,
        others=(*base.others, settings.of_update()),
    )


def _read(
    folder: Path, base: OpenedModel, *, dtype: Any, mesh: jax.sharding.Mesh | None
) -> dict[str, Any]:
    """The merged parameters: a sum in float32, which is rounded once."""
    loaded = base.load(dtype=dtype, mesh=mesh)
    adapters, settings = load_peft(folder, loaded)
    merge = jax.jit(functools.partial(lora.merge, settings=settings, dtype=jnp.dtype(dtype)))
    return merge(loaded.params, adapters)
