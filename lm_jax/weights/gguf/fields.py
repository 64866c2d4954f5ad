"""Fields and tensors of a GGUF file: every field is read or known to change nothing."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.text.gguf_reader import contents

REMEDY = "use the Hugging Face folder of the model"
_NO_EFFECT = ("vocab_size", "tensor_data_layout")
_ROWS = 4096


class Fields:
    """The fields `<architecture>.*` of a file; remembers which were asked for."""

    def __init__(self, path: Path, kind: str, fields: Mapping[str, Any]):
        self._where = f"{path}: GGUF field {kind}."
        self._values = {
            key.removeprefix(f"{kind}."): contents(field)
            for key, field in fields.items()
            if key.startswith(f"{kind}.")
        }
        self._asked: set[str] = set(_NO_EFFECT)

    def number(self, key: str, *default: Any) -> Any:
        """A positive number; the default, which may be anything, where there is no such field."""
        value = self(key, *default)
        if key in self._values and (not isinstance(value, int | float) or not value > 0):
            self.refuse(key, "must be one positive number for all layers")
        return value

    def __call__(self, key: str, *default: Any) -> Any:
        self._asked.add(key)
        if key not in self._values and not default:
            raise BadInputError(f"{self._where}{key} is missing; fetch the file again, or {REMEDY}")
        return self._values.get(key, *default)

    def only(self, key: str, value: Any) -> None:
        """Refuses the field, where it is there, if it is not `value`."""
        if self(key, value) != value:
            self.refuse(key, f"is not supported (only {value!r} is)")

    def refuse(self, key: str, why: str) -> None:
        raise BadInputError(f"{self._where}{key} = {self._values[key]!r} {why}; {REMEDY}")

    def check_all_asked(self) -> None:
        if unknown := sorted(self._values.keys() - self._asked):
            raise BadInputError(
                f"{self._where}{{{', '.join(unknown)}}} not known, and might change the model; "
                f"{REMEDY}"
            )


def dequantised(tensor: Any) -> np.ndarray:
    """A tensor in float32.

    Raises:
      BadInputError: if its quantisation cannot be undone.
    """
    from gguf.quants import dequantize

    w = np.empty(shape(tensor), np.float32)
    try:
        # What comes out not finite is refused by name where it is loaded.
        with np.errstate(invalid="ignore", over="ignore"):
            # Some rows at a time, as the package makes a second copy of what it is given.
            for start in range(0, len(w), _ROWS):
                part = slice(start, start + _ROWS)
                w[part] = dequantize(tensor.data[part], tensor.tensor_type)
    except NotImplementedError as error:
        raise BadInputError(
            f"GGUF: tensor {tensor.name} is quantised as {tensor.tensor_type.name}, which the gguf "
            f"package cannot undo; take another quantisation of the model, or {REMEDY}"
        ) from error
    return w


def shortest(x: float) -> float:
    """The shortest decimal that is this float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(x)))


def shape(tensor: Any) -> tuple[int, ...]:
    """The shape of a tensor; the format lists axes from the fastest varying one."""
    return tuple(int(n) for n in reversed(tensor.shape))
