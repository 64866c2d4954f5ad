"""Trained heads as a folder: what `iaj polyattn distill` leaves for other programs.

    heads = polyattn_jax.load_trained("runs/distill/trained")
    out = heads.forward(model, tokens_BT)
    ids = heads.generate(model, prompts, max_new_tokens=20)

    trained.json           the recipe, its bias and heads, the adapters' settings, the base's digest
    trained.safetensors    what was trained, float32: adapters of queries and keys, or the matrices
                           of a feature map

Softmax heads need the queries and keys of the base, the replaced ones their own; therefore adapters
are not merged into the weights, and the folder goes with the model that it was trained on.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.model import decode
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import Output
from lm_jax.model.lora import LoraConfig
from lm_jax.run.files import file_digest, new_folder, write_json
from lm_jax.run.results import load_result
from lm_jax.train.objective import LMBatch
from lm_jax.weights.load import Pretrained
from lm_jax.weights.safetensors import open_tensors, readable, write_tensors
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe, check_model
from polyattn_jax.recipes.row_maps import parse_recipe
from polyattn_jax.studies.distill.matching import HYBRID, HeadMatching

FACTS, TENSORS = "trained.json", "trained.safetensors"


@dataclasses.dataclass(frozen=True)
class TrainedFacts:
    """What is in the folder.

    Attributes:
      version: version of this format.
      hybrid: the recipe, its bias, its heads, and the weights that they belong to.
      adapters: adapters of queries and keys; not read for a feature map with matrices of its own.
      sha256: digest of the tensors' file.
    """

    version: Literal[1]
    hybrid: HybridRecipe
    adapters: LoraConfig
    sha256: str


@dataclasses.dataclass(frozen=True)
class TrainedHeads:
    """Heads with a recipe and what was trained of it."""

    hybrid: HybridRecipe
    adapters: LoraConfig
    params: dict[str, Any]

    def forward(
        self, model: Pretrained, tokens_BT: jax.Array, *, valid_BT: jax.Array | None = None
    ) -> Output:
        """The model with softmax in the kept heads and the trained recipe in the others.

        Args:
          model: the one that the heads were trained on.
          tokens_BT: ids.
          valid_BT: false where a token is padding.

        Raises:
          BadInputError: it is another model.
        """
        self._check(model)
        mask_BT = jnp.ones(tokens_BT.shape, bool) if valid_BT is None else valid_BT
        batch = LMBatch(tokens_BT, mask_BT, tokens_BT, mask_BT)
        return self.objective(model).run(self.params, model.params, batch, mixer=HYBRID)

    def generate(
        self, model: Pretrained, prompts: Sequence[Sequence[int]], **options: Any
    ) -> list[list[int]]:
        """Continues prompts as `lm_jax.model.decode.generate` does, which takes the `options`.

        The cache has room for two sets of keys and values, of the model and of the trained heads.

        Raises:
          BadInputError: it is another model, and as from `generate`.
        """
        self._check(model)
        weights, attend = self.objective(model).weights_and_attend(self.params, model.params)
        return decode.generate(weights, prompts, model.cfg, attend=attend, mixer=HYBRID, **options)

    def objective(self, model: Pretrained) -> HeadMatching:
        """The objective that trained them, on this model."""
        return HeadMatching(
            model.cfg,
            parse_recipe(self.hybrid.recipe).map,
            self.hybrid.bias,
            self.hybrid.replaced,
            self.adapters,
        )

    def _check(self, model: Pretrained) -> None:
        check_model(self.hybrid, model, "trained heads")


def save_trained(folder: str | Path, heads: TrainedHeads) -> None:
    """Writes heads as a new folder.

    Raises:
      BadInputError: the folder exists.
      StorageError: it cannot be written.
    """
    leaves = params_lib.by_path(heads.params)
    with new_folder(folder) as draft:
        tensors = {path: np.asarray(leaf, np.float32) for path, leaf in leaves.items()}
        write_tensors(draft / TENSORS, tensors, {})
        digest = file_digest(draft / TENSORS)["sha256"]
        write_json(draft / FACTS, TrainedFacts(1, heads.hybrid, heads.adapters, digest))


def load_trained(folder: str | Path) -> TrainedHeads:
    """Reads the folder of `save_trained`; the model that the heads belong to is not read.

    Raises:
      BadInputError: a file is not there, or the tensors cannot be read.
      CorruptError: the facts lack a field or the tensors are not those that were written.
    """
    folder = Path(folder)
    if not (folder / FACTS).is_file():
        raise BadInputError(
            f"{folder} has no {FACTS}; name the folder trained/ in a work folder of iaj polyattn "
            "distill"
        )
    facts = load_result(folder / FACTS, TrainedFacts)
    file = folder / TENSORS
    if not file.is_file() or file_digest(file)["sha256"] != facts.sha256:
        raise CorruptError(
            f"{file} is not the file that was written beside {FACTS}; copy the folder again, or "
            "distill again in a new work folder"
        )
    opened = open_tensors(file)
    with readable(file):
        leaves = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return TrainedHeads(facts.hybrid, facts.adapters, params_lib.tree_from_paths(leaves))
