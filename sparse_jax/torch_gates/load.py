"""Gates from the folder of an exported sparse model, given to the layers of its torch model."""

from collections.abc import Sequence
import os
from pathlib import Path
import tempfile
from typing import Any

import numpy as np

from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError
from lm_jax.weights import peft_settings
from lm_jax.weights.compat import transformers
from sparse_jax.gates import model as sparse_model
from sparse_jax.torch_gates.attention import register
from sparse_jax.torch_gates.gates import (
    NAME,
    Layer,
    TorchGates,
    attention_modules,
    implementation,
    require_torch,
)


def load(folder: str | os.PathLike[str], **options: Any) -> tuple[Any, TorchGates]:
    """A torch model that is sparse, and its gates.

    Args:
      folder: folder of an exported sparse model, or the name of a published one. Adapters over a
        base, which may be of a kind that transformers cannot read, are merged into it in float32
        and written to a temporary folder first.
      **options: options of `AutoModelForCausalLM.from_pretrained`, such as `dtype`.

    Raises:
      UsageError: torch is not installed.
      BadInputError, CorruptError: as `load_gates`.
    """
    register()
    folder = published.resolve_model(folder)
    # Before weights are read.
    sparse_model.read_note(folder)
    if not peft_settings.is_peft(folder):
        return _loaded(folder, options)
    with tempfile.TemporaryDirectory() as parent:
        merged, whole = sparse_model.load(folder), Path(parent) / "model"
        sparse_model.save(whole, merged.base, merged.gates, merged.numbers)
        return _loaded(whole, options)


def _loaded(folder: Path, options: dict[str, Any]) -> tuple[Any, TorchGates]:
    model = transformers().AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation=NAME, **options
    )
    return model, load_gates(model)


def load_gates(model: Any, folder: str | os.PathLike[str] | None = None) -> TorchGates:
    """Reads the gates of an exported model and gives each attention layer its own.

    Args:
      model: causal language model of transformers, loaded from the exported folder.
      folder: folder of the gates; by default that which the model was loaded from.

    Raises:
      UsageError: torch is not installed, or the model has another attention function.
      BadInputError: the folder has no gates, or they belong to other weights than the model's.
      CorruptError: as `sparse_jax.load`.
    """
    require_torch()
    if (found := implementation(model)) != NAME:
        raise UsageError(
            f"attn_implementation = {found!r} of this model ignores gates; after "
            f"torch_gates.register() load it with attn_implementation={NAME!r}, or call "
            f"model.set_attn_implementation({NAME!r})"
        )
    folder = published.resolve_model(model.name_or_path if folder is None else folder)
    if peft_settings.is_peft(folder):
        raise BadInputError(
            f"{folder} holds adapters over a base; load both with torch_gates.load(folder)"
        )
    opened, gates = sparse_model.open_gates(folder)
    _check_weights(model, folder, opened.files)
    bias_LN = np.asarray(gates.bias_LN)
    result = TorchGates(model, bias_LN, gates.raw_gate, gates.renormalise)
    for index, module in enumerate(attention_modules(model, len(bias_LN))):
        setattr(module, NAME, Layer(result, index))
    return result


def _check_weights(model: Any, folder: Path, files: Sequence[Path]) -> None:
    """Raises unless the model holds the weights of the folder, rounded to its own dtype."""
    from safetensors import safe_open

    held, compared = model.state_dict(), 0
    for file in files:
        with safe_open(file, framework="pt") as stored:
            for name in stored.keys() & held.keys():
                own, compared = held[name], compared + 1
                wanted = stored.get_tensor(name).to(own.device, own.dtype)
                if own.shape != wanted.shape or not bool((own == wanted).all()):
                    raise BadInputError(
                        f"model: {name} is not that of {folder}, whose gates are of its own "
                        "weights; load the model from there, and change weights afterwards"
                    )
    if not compared:
        raise BadInputError(
            f"model: it has no weight of {folder}; load the model from the folder of its gates"
        )
