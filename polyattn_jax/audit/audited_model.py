"""The model under audit, with its mesh and the settings of the audit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.row_map_attention.maps import RowMap
from lm_jax.errors import BadInputError
from lm_jax.parallel import sharding
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.load import Pretrained, load_pretrained
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.row_maps import SOFTMAX, Map, parse_recipe


@dataclasses.dataclass(frozen=True)
class AuditedModel:
    """The model under audit, where its arrays live, and the settings."""

    model: Pretrained
    mesh: jax.sharding.Mesh | None
    config: AuditConfig

    @property
    def shape(self) -> tuple[int, int]:
        """The numbers of layers and of heads of a layer."""
        return self.model.cfg.num_layers, self.model.cfg.num_heads

    @property
    def maps(self) -> tuple[Map, ...]:
        """Every row map of the audit: one table for all stages, so each shape compiles once."""
        c = self.config
        recipes = [SOFTMAX, *(parse_recipe(r) for r in (*c.recipes, c.ablation_recipe))]
        return tuple(dict.fromkeys(recipe.map for recipe in recipes))

    @property
    def fused(self) -> bool:
        """Whether attention runs on `kernels`."""
        if self.config.attention == "auto":
            known = all(isinstance(row_map, RowMap) for row_map in self.maps)
            return known and self.mesh is None and jax.default_backend() == "gpu"
        return self.config.attention == "kernels"

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer.

        Raises:
          BadInputError: if it came without one.
        """
        if self.model.tokenizer is None:
            raise BadInputError(
                f"config.model = {self.config.model!r} has no tokenizer.json; the suites need the "
                "model's own"
            )
        return self.model.tokenizer

    def put(self, *arrays: np.ndarray) -> list[jax.Array]:
        """Arrays whose first axis is the batch, on the device or the mesh."""
        if self.mesh is None:
            return [jnp.asarray(a) for a in arrays]
        return sharding.shard_batch(self.mesh, list(arrays))


def load(config: AuditConfig) -> AuditedModel:
    """Loads the model onto the device of this process, or onto a mesh of its devices."""
    mesh = None
    if config.mesh != (1, 1, 1):
        own = jax.local_devices()
        mesh = sharding.make_mesh(*config.mesh, devices=own)
    model = load_pretrained(config.model, dtype=jnp.dtype(config.dtype), mesh=mesh)
    return AuditedModel(model, mesh, config)
