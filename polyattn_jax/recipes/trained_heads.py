"""Trained heads as a folder: what `iaj polyattn distill` leaves for other programs.

    heads = polyattn_jax.load_trained("runs/distill/trained")
    out = heads.forward(model, tokens_BT)
    ids = heads.generate(model, prompts, max_new_tokens=20)

    trained.json           the recipe, its bias and heads, the adapters' settings, the base's digest
    trained.safetensors    what was trained, float32: adapters of weights of attention, the matrices
                           of a feature map, or both

Softmax heads need the queries, keys and values of the base, the replaced ones their own; therefore
adapters are not merged into the weights, and the folder goes with the model that it was trained on.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.model import decode, lora
from lm_jax.model import params as params_lib
from lm_jax.model.attention import Fused
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward
from lm_jax.model.lora import LoraConfig
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.run.files import file_digest, new_folder, write_json
from lm_jax.run.results import load_result
from lm_jax.train.objective import LMBatch, MakeBatch, ignore_index_batch
from lm_jax.weights.load import Pretrained
from lm_jax.weights.safetensors import open_tensors, readable, write_tensors
from polyattn_jax.recipes.hybrid_recipe import HybridRecipe, check_model
from polyattn_jax.recipes.row_maps import Map, parse_recipe
from polyattn_jax.recipes.trained_attention import HYBRID, student_attend

MAPS, ADAPTERS = "maps", "adapters"
FACTS, TENSORS = "trained.json", "trained.safetensors"


@dataclasses.dataclass(frozen=True)
class ReplacedHeads:
    """A model with a recipe in some heads, and which of its weights have adapters.

    The trained parameters have `MAPS`, the matrices of a feature map, and `ADAPTERS`, those of
    `adapters`; either may be absent.

    Attributes:
      cfg: the model.
      row_map: what replaces softmax.
      bias: b of all heads, or by layer and head.
      replaced: (layer, head) of every replaced head.
      adapters: adapters of weights of attention.
      make_batch: function from rows of ids to inputs, targets and masks.
    """

    cfg: DecoderConfig
    row_map: Map
    bias: float | tuple[tuple[float, ...], ...]
    replaced: tuple[tuple[int, int], ...]
    adapters: LoraConfig = dataclasses.field(default_factory=LoraConfig)
    make_batch: MakeBatch = ignore_index_batch

    def run(
        self,
        params: ParamTree,
        frozen: Any,
        batch: LMBatch,
        *,
        mixer: Mixer,
        queries: tuple[int, ...] = (),
        remat: bool = False,
        heads_LN: jax.Array | None = None,
        logits_at: jax.Array | None = None,
    ) -> Output:
        """The forward pass with `MATCHED` or `HYBRID`, and S at these queries under the former.

        The replaced heads are those of a mask, or `replaced`; `logits_at` is that of `forward`.
        """
        weights, attend = self.weights_and_attend(params, frozen, queries, heads_LN)
        return forward(
            weights,
            batch.input_BT,
            self.cfg,
            attend=attend,
            mixer=mixer,
            valid_BT=batch.input_mask_BT,
            remat=remat,
            logits_at=logits_at,
        )

    def weights_and_attend(
        self,
        params: ParamTree,
        frozen: Any,
        queries: tuple[int, ...] = (),
        heads_LN: jax.Array | None = None,
    ) -> tuple[ParamTree, Fused]:
        """The weights and the attend that `MATCHED` and `HYBRID` need."""
        bias_LN = np.broadcast_to(np.asarray(self.bias, np.float32), self.heads_LN.shape)
        attend = student_attend(
            self.row_map,
            jnp.asarray(bias_LN),
            jnp.asarray(self.heads_LN) if heads_LN is None else heads_LN,
            matrices=params.get(MAPS),
            queries=queries,
        )
        if ADAPTERS not in params:
            return frozen, attend
        return lora.attach(frozen, params[ADAPTERS], self.adapters), attend

    @property
    def heads_LN(self) -> np.ndarray:
        """The replaced heads as a mask."""
        mask = np.zeros((self.cfg.num_layers, self.cfg.num_heads), bool)
        for place in self.replaced:
            mask[place] = True
        return mask


@dataclasses.dataclass(frozen=True)
class TrainedFacts:
    """What is in the folder.

    Attributes:
      version: version of this format.
      hybrid: the recipe, its bias, its heads, and the weights that they belong to.
      adapters: settings of the adapters; not read where the tensors have none.
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

    def objective(self, model: Pretrained) -> ReplacedHeads:
        """The forward passes of these heads in this model."""
        return ReplacedHeads(
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
