"""A hybrid: a recipe in some heads of one model and softmax in the others, as a file.

    attend = polyattn_jax.load_recipe("heads.json", model)
    lm_jax.forward(model.params, tokens_BT, model.cfg, attend=attend)

`check --hybrid=FILE` finds the heads and writes the file.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError
from lm_jax.model.attention import Fused, PerLayer
from lm_jax.run.identity import difference
from lm_jax.run.results import Count, load_result
from lm_jax.weights.load import Pretrained
from polyattn_jax.recipes.row_maps import DISTANCE, parse_recipe
from polyattn_jax.recipes.substitute import substitute


@dataclasses.dataclass(frozen=True)
class HybridRecipe:
    """Which heads of a model get a recipe.

    Attributes:
      version: version of this format.
      model_sha256: identity of the model that the heads were found on (`ModelIdentity.text`); in a
        file of an earlier version the digest of its weights.
      recipe: the recipe's spec.
      bias: b that it runs with, whatever its spec says, or one by layer and head; of gdn the mean
        distance.
      layers: layers of the model.
      heads: query heads of each layer.
      replaced: (layer, head) of every head that gets the recipe, ascending.
    """

    version: Literal[1]
    model: str
    model_sha256: str
    recipe: str
    bias: float | tuple[tuple[float, ...], ...]
    layers: Count
    heads: Count
    replaced: tuple[tuple[Count, Count], ...]

    def __post_init__(self) -> None:
        option = parse_recipe(self.recipe).option
        if option == DISTANCE and np.min(self.bias) < 0:
            raise ValueError("bias holds mean distances, which must be 0 or more")
        if list(self.replaced) != sorted(set(self.replaced)):
            raise ValueError("replaced must name each head once, in ascending order")
        if any(layer >= self.layers or head >= self.heads for layer, head in self.replaced):
            size = f"{self.layers} layers of {self.heads} heads"
            raise ValueError(f"replaced names a head beyond {size}; remove it")
        if (
            isinstance(self.bias, tuple)
            and [len(row) for row in self.bias] != [self.heads] * self.layers
        ):
            raise ValueError(f"bias must be a number, or {self.layers} rows of {self.heads}")

    @property
    def heads_LN(self) -> np.ndarray:
        """The replaced heads as a mask."""
        mask = np.zeros((self.layers, self.heads), bool)
        for layer, head in self.replaced:
            mask[layer, head] = True
        return mask


def replaced_heads(heads_LN: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The (layer, head) of every head of a mask."""
    return tuple((int(layer), int(head)) for layer, head in np.argwhere(heads_LN))


def check_model(hybrid: HybridRecipe, model: Pretrained, where: str) -> None:
    """Refuses a model that the heads were not found on.

    Args:
      hybrid: the heads.
      model: the one that they are to run in.
      where: the file or folder that they were read from.

    Raises:
      BadInputError: naming what of the model differs.
    """
    if change := difference(hybrid.model_sha256, model.identity.text, where=where):
        raise BadInputError(
            f"{where}: the heads were found on {hybrid.model} with {change}; load them with that "
            "model"
        )


def load_recipe(path: str | Path, model: Pretrained) -> PerLayer | Fused:
    """The attend that runs the hybrid of a file, to be passed to `lm_jax.forward`.

    Args:
      path: a file that `check --hybrid=FILE` wrote.
      model: the one that the heads were found on.

    Raises:
      BadInputError: the heads were found on another model.
      CorruptError: a field is missing, unknown or of another type, or the model has no such head.
    """
    hybrid = load_result(path, HybridRecipe)
    check_model(hybrid, model, str(path))
    row_map = parse_recipe(hybrid.recipe).map
    return substitute([row_map], 0, jnp.asarray(hybrid.bias), jnp.asarray(hybrid.heads_LN))
