"""The model under audit, with its mesh and the settings of the audit."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from iaj_kernels.row_map_attention.maps import RowMap
from lm_jax.assets import published
from lm_jax.errors import BadInputError
from lm_jax.parallel import sharding
from lm_jax.run.identity import ModelIdentity
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights import gates, runs
from lm_jax.weights.load import Pretrained, load_pretrained, open_pretrained, resolve
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.recipes.gates import GATES
from polyattn_jax.recipes.row_maps import SOFTMAX, Map, parse_recipe
from polyattn_jax.recipes.trained_model import TRAINED


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
    def longest(self) -> int:
        """Most tokens of a prompt: `config.context`, or else the model's own."""
        return self.config.context or self.model.cfg.max_length

    @property
    def maps(self) -> tuple[Map, ...]:
        """Every row map of the audit: one table for all stages, so each shape compiles once."""
        c = self.config
        recipes = [SOFTMAX, *(parse_recipe(r) for r in (*c.recipes, c.ablation_recipe))]
        return tuple(dict.fromkeys(recipe.map for recipe in recipes))

    @property
    def fused(self) -> bool:
        """Whether attention runs on `kernels`, which know neither gates nor trained heads."""
        for part, has in ((GATES, "gates"), (TRAINED, "trained heads")):
            if part in self.model.params:
                if self.config.attention == "kernels":
                    raise BadInputError(
                        f"config.attention = 'kernels', but {self.config.model} has {has}, which "
                        "no kernel of row maps computes; set it to 'auto' or 'dense'"
                    )
                return False
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
    """Loads the model onto the device of this process, or onto a mesh of its devices.

    Raises:
      BadInputError: `config.context` is beyond the positions that the model has learned.
    """
    audited = _load(config)
    cfg = audited.model.cfg
    if cfg.rope is None and config.context > cfg.max_length:
        raise BadInputError(
            f"config.context = {config.context:,} is beyond the {cfg.max_length:,} positions that "
            f"{config.model} has learned; lower it, or set it to 0"
        )
    return audited


def _load(config: AuditConfig) -> AuditedModel:
    mesh = None
    if config.mesh != (1, 1, 1):
        own = jax.local_devices()
        mesh = sharding.make_mesh(*config.mesh, devices=own)
    dtype = jnp.dtype(config.dtype)
    if run := runs.softmax_run(published.resolve_model(config.model), dtype=dtype, mesh=mesh):
        return AuditedModel(run, mesh, config)
    if not gates.has_gates(config.model):
        return AuditedModel(load_pretrained(config.model, dtype=dtype, mesh=mesh), mesh, config)
    base = load_pretrained(config.model, dtype=dtype, mesh=mesh, without_gates=True)
    folder = resolve(config.model)
    own = gates.checked_gates(folder, gates.read_note(folder), base)
    whole = dataclasses.replace(base, params=base.params | {GATES: own})
    return AuditedModel(gates.with_gates(whole, own), mesh, config)


def model_identity(source: str) -> ModelIdentity:
    """The identity of a source, with its gates if it has some; its weights are not loaded.

    Raises:
      BadInputError, CorruptError: it cannot be read.
    """
    if run := runs.read_run(published.resolve_model(source)):
        return run.identity
    if not gates.has_gates(source):
        return open_pretrained(source).identity
    folder = resolve(source)
    opened = open_pretrained(source, without_gates=True)
    return gates.identity(opened, gates.checked_gates(folder, gates.read_note(folder), opened))
