"""The objectives: the outputs of heads, and after them the distribution of the next token.

The first is the attention transfer of Hedgehog (Zhang et al. 2024, arXiv:2402.04347), on outputs in
place of patterns. Every layer reads the residual stream of the frozen model, whose heads give z
with softmax; the replaced heads give z' on the same stream with the recipe and what is trained of
it,

    Hedgehog      W of queries for each head and W of keys for each KV head, from W = 1
    other maps    low-rank adapters on the projections of queries and keys, from no change

and the loss is the mean over replaced heads of sum |z' - z|^2 / sum |z|^2 over the tokens of a
batch. So layers are trained at once and independently, and no gradient passes through the MLPs.

The second goes on from there, through the whole model: the mean over tokens of KL(p || q), with p
the distribution of the frozen model and q that of the hybrid. It trains the same parameters, and
adapters of further weights of attention (as LoLCATs, Zhang et al. 2025, arXiv:2410.10254, which
minimises the loss on text there).
"""

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model import lora
from lm_jax.model import params as params_lib
from lm_jax.model.decoder import Output, forward, param_spec
from lm_jax.model.flops import Causal, forward_flops
from lm_jax.model.mixers import ATTENTION
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.run.config import stored_fields, to_plain
from lm_jax.train import losses
from lm_jax.train.objective import LMBatch, Numbers, Stateless, input_length
from polyattn_jax.recipes.feature_maps import FeatureMap
from polyattn_jax.recipes.trained_attention import HYBRID, MATCHED
from polyattn_jax.recipes.trained_heads import ADAPTERS, MAPS, ReplacedHeads


@dataclasses.dataclass(frozen=True)
class Matching(ReplacedHeads, Stateless):
    """What both objectives share; `frozen` is the model."""

    dtype: str = "float32"
    name: ClassVar[str]

    def __post_init__(self) -> None:
        self.cfg.check_equal_blocks("distill: training of replaced heads")

    @property
    def trains_maps(self) -> bool:
        """Whether the matrices of a feature map are trained."""
        return isinstance(self.row_map, FeatureMap) and self.row_map.trained

    def metadata(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        fields["make_batch"] = self.make_batch.__qualname__
        fields["row_map"] = {
            "class": type(self.row_map).__qualname__,
            **stored_fields(self.row_map),
        }
        return to_plain({self.name: fields})

    def normalizers(self, tokens_BS: jax.Array) -> Numbers:
        return {"tokens": jnp.maximum(self.make_batch(tokens_BS).loss_mask_BT.sum(), 1)}

    def _maps(self) -> ParamTree:
        H, L = self.cfg.head_dim, self.cfg.num_layers
        sizes = {"q": ("N", self.cfg.num_heads), "k": ("K", self.cfg.num_kv_heads)}
        return {
            name: ParamSpec((count, H, H), f"{letter}HH", _identity).stacked(L)
            for name, (letter, count) in sizes.items()
        }

    def _adapters(self) -> ParamTree:
        return lora.adapter_spec(param_spec(self.cfg), self.adapters)


@dataclasses.dataclass(frozen=True)
class HeadMatching(Matching):
    """The relative error of the replaced heads, as an objective of `lm_jax.train`.

    Evaluations weight the error of a batch by its tokens. `adapters`, of queries and keys, are not
    read for a feature map with matrices of its own.

    Raises:
      UsageError: no head is replaced.
    """

    name: ClassVar[str] = "head_matching"

    def __post_init__(self) -> None:
        if not self.replaced:
            raise UsageError("distill: no head is replaced; name a hybrid that replaces some")
        super().__post_init__()

    @property
    def spec(self) -> ParamTree:
        return {MAPS: self._maps()} if self.trains_maps else {ADAPTERS: self._adapters()}

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Any,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del aux_state, normalizers, rng
        output = self.run(params, frozen, self.make_batch(tokens_BS), mixer=MATCHED)
        loss = self._error(output)
        return loss, {"loss": loss}

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        read = input_length(self.make_batch, rows, columns)
        forward = forward_flops(self.cfg, ATTENTION, read, causal=causal)
        student = 3 * forward.mixing + forward.projections
        return rows * (forward.total + student + 6 * read * params_lib.count(self.spec))

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        batch = self.make_batch(tokens_BS)
        tokens = batch.loss_mask_BT.sum()
        output = self.run(params, frozen, batch, mixer=MATCHED)
        return {"loss": self._error(output) * tokens, "tokens": tokens}

    def _error(self, output: Output) -> jax.Array:
        error_LN, energy_LN = (output.aux[name].sum(1) for name in ("error_BN", "energy_BN"))
        ratio_LN = error_LN / jnp.maximum(energy_LN, jnp.finfo(jnp.float32).tiny)
        return jnp.where(self.heads_LN, ratio_LN, 0).sum() / len(self.replaced)


@dataclasses.dataclass(frozen=True)
class LogitMatching(Matching):
    """KL(frozen model || hybrid) of the next token, as an objective of `lm_jax.train`.

    The mean over tokens, in nats. Trained are all of `adapters` and the matrices of a feature map
    that has some. Layers without a replaced head have no gradient.
    """

    name: ClassVar[str] = "logit_matching"

    @property
    def spec(self) -> ParamTree:
        maps = {MAPS: self._maps()} if self.trains_maps else {}
        return {**maps, ADAPTERS: self._adapters()}

    def begun(self, trained: ParamTree, seed: int) -> ParamTree:
        """Initial parameters: those that a `HeadMatching` trained, and fresh adapters."""
        fresh = params_lib.by_path(params_lib.init(jax.random.key(seed), self.spec))
        # A training frees the arrays that it starts from.
        kept = {path: jnp.copy(leaf) for path, leaf in params_lib.by_path(trained).items()}
        return params_lib.tree_from_paths(fresh | kept)

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Any,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del aux_state, rng
        batch = self.make_batch(tokens_BS)
        hybrid, teacher = self._predictors(params, frozen, batch)
        sums = losses.summed(
            hybrid,
            batch.target_BT,
            batch.loss_mask_BT,
            self.cfg,
            teacher=teacher,
            distill=1.0,
            likelihood=0.0,
        )
        loss = sums.minimised / normalizers["tokens"]
        return loss, {"loss": loss}

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        read = input_length(self.make_batch, rows, columns)
        forward = forward_flops(self.cfg, ATTENTION, read, causal=causal)
        # Frozen weights need no gradient; the hybrid has a second attention, of the kept heads.
        hybrid = 2 * (forward.weights + forward.projections) + 6 * forward.mixing
        return rows * (forward.total + hybrid + 6 * read * params_lib.count(self.spec))

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        batch = self.make_batch(tokens_BS)
        hybrid, teacher = self._predictors(params, frozen, batch)
        kl_BT = losses.token_divergence(hybrid, teacher, self.cfg)
        return {
            "loss": jnp.sum(jnp.where(batch.loss_mask_BT, kl_BT, 0.0)),
            "tokens": batch.loss_mask_BT.sum(),
        }

    def _predictors(
        self, params: ParamTree, frozen: Any, batch: LMBatch
    ) -> tuple[losses.Predictor, losses.Predictor]:
        """The hybrid and the frozen model on a batch."""
        model, heads_LN = self._model_and_heads(frozen)
        hybrid = self.run(params, model, batch, mixer=HYBRID, remat=True, heads_LN=heads_LN)
        teacher = forward(model, batch.input_BT, self.cfg, valid_BT=batch.input_mask_BT)
        return losses.Predictor(hybrid.hidden, model), losses.Predictor(teacher.hidden, model)

    def _model_and_heads(self, frozen: Any) -> tuple[ParamTree, jax.Array | None]:
        """The model, and the mask of the replaced heads where it is data."""
        return frozen, None


@dataclasses.dataclass(frozen=True)
class GivenHeads(LogitMatching):
    """The same of heads that are data, so that all sets of heads compile once.

    `frozen` has "model" and "heads_LN", the mask of the replaced heads; `replaced` is not read.
    """

    name: ClassVar[str] = "given_heads"

    def _model_and_heads(self, frozen: Any) -> tuple[ParamTree, jax.Array | None]:
        return frozen["model"], frozen["heads_LN"]


def _identity(key: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    del key
    return jnp.broadcast_to(jnp.eye(shape[-1], dtype=dtype), shape)
