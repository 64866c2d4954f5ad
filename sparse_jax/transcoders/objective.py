"""Training of a transcoder, as an objective of the shared training loop.

Sparse Attention Post-Training, Eq. 10. Inputs and outputs of the model's MLPs are computed in the
step, from the tokens of the batch, and scaled to a mean norm of sqrt(D) per layer. With e_l the
error of layer l and w_f the norm of feature f's decoders over all targets together, each the mean
over tokens:

    sum_l ||e_l||^2                          reconstruction: a sum over layers and over D
    + c0 sum_f tanh(C z_f w_f)               sparsity: a sum over layers and features
    + c1 sum_f max(theta_f - x_f, 0) w_f     for dead features: all those below their threshold

    + c2 sum_l ||e_l - e'_l||^2              AuxK: dead features are to write the error (Gao et al.,
                                             2024), itself a constant of this term

c0 rises over the first `ramp` of the updates and then stays. BatchTopK has no sparsity term; the
number of features that it keeps falls over as many updates, exponentially, to `active` a layer.
e'_l is written by the largest `aux_active` pre-activations, per token and layer, of features that
were silent for `silent_steps` updates.
"""

import dataclasses
import math
from typing import Annotated, Any, ClassVar, Literal, get_args

from flax import struct
import jax
import jax.numpy as jnp

from lm_jax.errors import out_of_range
from lm_jax.model.flops import Causal
from lm_jax.model.params import ParamTree
from lm_jax.run.config import to_plain
from lm_jax.run.settings import (
    Bound,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Settings,
    choice,
)
from lm_jax.train.objective import MakeBatch, Numbers, ignore_index_batch
from sparse_jax.circuits.runs import CircuitModel
from sparse_jax.transcoders import transcoder as transcoder_lib
from sparse_jax.transcoders.activations import batch_topk
from sparse_jax.transcoders.inputs import Activations, Scales, read_activations
from sparse_jax.transcoders.transcoder import Transcoder, TranscoderConfig

_ROOM = 1e-6

# How a coefficient gets from 0 to its peak: in equal steps, or as half a cosine wave.
Rise = Literal["linear", "cosine"]
_RAMP = Bound("above 0 and at most 1", lambda value: 0 < value <= 1)


@dataclasses.dataclass(frozen=True)
class Penalties(Settings):
    """Coefficients of the loss, for inputs and outputs scaled to norm sqrt(D).

    Attributes:
      sparsity: coefficient c0 of the sparsity penalty, at its peak.
      tanh_scale: factor C inside the tanh of the sparsity penalty.
      dead: coefficient c1 of the loss that revives dead features.
      ramp: share of the updates in which `sparsity` rises, or the number of active features falls.
      rise: shape of the ramp, "linear" (the paper) or "cosine".
      active: features that BatchTopK keeps, per token and layer.
      active_start: features that BatchTopK keeps in the first update.
      silent_steps: updates without activity after which a feature counts as dead.
      aux: coefficient c2 of AuxK; 0 is without it, as JumpReLU is usually trained (with `dead` in
        its place). 1/32 is usual with TopK and BatchTopK.
      aux_active: dead features that AuxK may use, per token and layer.

    Raises:
      UsageError: fields are out of range.
    """

    where: ClassVar[str] = "penalties."

    sparsity: NonNegativeFloat = 2.0
    tanh_scale: PositiveFloat = 4.0
    dead: NonNegativeFloat = 1e-5
    ramp: Annotated[float, _RAMP] = 0.8
    active: PositiveInt = 16
    active_start: int = 160
    silent_steps: PositiveInt = 250
    rise: Annotated[Rise, choice(get_args(Rise))] = "linear"
    aux: NonNegativeFloat = 0.0
    aux_active: PositiveInt = 32

    def problems(self) -> list[str]:
        """What does not fit together."""
        wanted = {"active_start": (self.active_start >= self.active, "at least `active`")}
        return out_of_range(self, wanted, prefix=self.where)


@struct.dataclass
class Frozen:
    """What a step reads and does not train: the model, and the scales of its activations."""

    model: CircuitModel
    scales: Scales


@struct.dataclass
class Progress:
    """Past updates, and for how many of them each feature was silent, int32 [L, F]."""

    updates: jax.Array
    silent_LF: jax.Array


@dataclasses.dataclass(frozen=True)
class Transcoding:
    """The loss of a transcoder.

    A step reports `l0`, active features per token over all layers; `nmse`, the mean of squared
    errors over that of squared outputs; `dead`, the share of features that were silent for
    `silent_steps` updates; and `sparsity`, the c0 of the step (for BatchTopK the features kept).
    An evaluation counts, by layer, squared errors, outputs and their squares, and active features.

    Attributes:
      cfg: the transcoder.
      penalties: penalties of the loss.
      steps: updates of the run.
      skip_start: first tokens of a row that are left out, which attention sinks dominate.
      outlier: tokens are left out whose input has a norm of at least so many times the mean norm.
      dtype: dtype of the computation.
      make_batch: function from rows of ids to inputs, targets and masks.
    """

    cfg: TranscoderConfig
    penalties: Penalties
    steps: int
    skip_start: int = 1
    outlier: float = 20.0
    dtype: str = "float32"
    make_batch: MakeBatch = ignore_index_batch

    @property
    def columns(self) -> tuple[str, ...]:
        return "l0", "nmse", "dead", "sparsity"

    @property
    def spec(self) -> ParamTree:
        return transcoder_lib.spec(self.cfg)

    def metadata(self) -> dict[str, Any]:
        fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return to_plain({"transcoding": fields | {"make_batch": self.make_batch.__qualname__}})

    def init_state(self) -> Progress:
        shape = (self.cfg.num_layers, self.cfg.features)
        return Progress(jnp.zeros((), jnp.int32), jnp.zeros(shape, jnp.int32))

    def normalizers(self, tokens_BS: jax.Array) -> Numbers:
        mask_BT = self.make_batch(tokens_BS).input_mask_BT
        return {"tokens": jnp.maximum(mask_BT[:, self.skip_start :].sum(), 1)}

    def _activations(self, frozen: Frozen, tokens_BS: jax.Array) -> Activations:
        return read_activations(
            frozen.model,
            frozen.scales,
            self.make_batch(tokens_BS),
            skip_start=self.skip_start,
            outlier=self.outlier,
        )

    def _ramp(self, updates: jax.Array) -> jax.Array:
        """How far the ramp has got at an update, from 0 to 1."""
        done = jnp.clip(updates / (self.penalties.ramp * self.steps), 0.0, 1.0)
        return done if self.penalties.rise == "linear" else (1.0 - jnp.cos(math.pi * done)) / 2.0

    def _kept(self, updates: jax.Array) -> jax.Array:
        """Features per token and layer that BatchTopK keeps, a real number."""
        p = self.penalties
        return p.active_start * (p.active / p.active_start) ** self._ramp(updates)

    def _strength(self, updates: jax.Array) -> jax.Array:
        """c0 at an update, or the features that BatchTopK keeps."""
        if self.cfg.kind == "batchtopk":
            return self._kept(updates)
        return self.penalties.sparsity * self._ramp(updates)

    def features(
        self, transcoder: Transcoder, acts: Activations, updates: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Pre-activations and features `[L, X, F]` of a training step."""
        pre_LXF = transcoder.pre_activations(acts.input_LXD)
        if self.cfg.kind != "batchtopk":
            return pre_LXF, transcoder.activate(pre_LXF)
        count = self._kept(updates) * self.cfg.num_layers * acts.mask_X.sum()
        counted_LXF = jnp.where(acts.mask_X[None, :, None], pre_LXF, 0.0)
        return pre_LXF, batch_topk(counted_LXF, count)[0]

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Frozen,
        aux_state: Progress,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del rng
        acts = self._activations(frozen, tokens_BS)
        return self.loss(params, acts, aux_state, normalizers["tokens"])

    def loss(
        self, params: ParamTree, acts: Activations, aux_state: Progress, tokens: jax.Array
    ) -> tuple[jax.Array, Numbers]:
        """The part of these activations in a mean over `tokens` tokens, and its metrics."""
        p, transcoder = self.penalties, Transcoder(params, self.cfg)
        mask_1X1 = acts.mask_X[None, :, None]
        pre_LXF, z_LXF = self.features(transcoder, acts, aux_state.updates)
        error_LXD = jnp.where(mask_1X1, transcoder.decode(z_LXF) - acts.output_LXD, 0.0)
        error = jnp.sum(error_LXD**2) / tokens
        norms_L1F = transcoder.decoder_norms()[:, None]
        below_LXF = jax.nn.relu(transcoder.theta_LF[:, None] - pre_LXF) * norms_L1F
        minimised = error + p.dead * jnp.sum(jnp.where(mask_1X1, below_LXF, 0.0)) / tokens
        if self.cfg.kind != "batchtopk":
            strength = self._strength(aux_state.updates)
            soft_LXF = jnp.tanh(p.tanh_scale * z_LXF * norms_L1F)
            minimised += strength * jnp.sum(jnp.where(mask_1X1, soft_LXF, 0.0)) / tokens
        if p.aux:
            left_LXD = jax.lax.stop_gradient(-error_LXD)
            minimised += p.aux * self._aux(transcoder, pre_LXF, left_LXD, acts, aux_state) / tokens
        active_LXF = (z_LXF > 0) & mask_1X1
        size = jnp.sum(jnp.where(mask_1X1, acts.output_LXD**2, 0.0))
        metrics = {
            "loss": minimised,
            "l0": active_LXF.sum() / tokens,
            "error": error,
            "size": size / tokens,
            "fired_LF": active_LXF.any(1).astype(jnp.int32),
        }
        return minimised, metrics

    def _aux(
        self,
        transcoder: Transcoder,
        pre_LXF: jax.Array,
        left_LXD: jax.Array,
        acts: Activations,
        aux_state: Progress,
    ) -> jax.Array:
        """Squared error of what dead features write against what is left of the outputs, summed."""
        dead_LF = aux_state.silent_LF >= self.penalties.silent_steps
        mask_1X1 = acts.mask_X[None, :, None]
        count = self.penalties.aux_active * self.cfg.num_layers * acts.mask_X.sum()
        z_LXF, _ = batch_topk(jnp.where(dead_LF[:, None] & mask_1X1, pre_LXF, 0.0), count)
        missed_LXD = jnp.where(mask_1X1, transcoder.written(z_LXF) - left_LXD, 0.0)
        return jnp.where(dead_LF.any(), jnp.sum(missed_LXD**2), 0.0)

    def update(self, aux_state: Progress, metrics: Numbers) -> tuple[Progress, Numbers]:
        silent_LF = jnp.where(metrics["fired_LF"] > 0, 0, aux_state.silent_LF + 1)
        dead = jnp.mean(silent_LF >= self.penalties.silent_steps, dtype=jnp.float32)
        # Of the whole batch: its micro-batches give terms of sums.
        nmse = metrics["error"] / (metrics["size"] + _ROOM)
        columns = {"dead": dead, "nmse": nmse, "sparsity": self._strength(aux_state.updates)}
        return Progress(aux_state.updates + 1, silent_LF), columns

    def evaluate(self, params: ParamTree, frozen: Frozen, tokens_BS: jax.Array) -> Numbers:
        transcoder = Transcoder(params, self.cfg)
        acts = self._activations(frozen, tokens_BS)
        _, z_LXF = self.features(transcoder, acts, jnp.int32(self.steps))
        mask_1X1 = acts.mask_X[None, :, None]
        output_LXD = jnp.where(mask_1X1, acts.output_LXD, 0.0)
        error_LXD = jnp.where(mask_1X1, transcoder.decode(z_LXF) - output_LXD, 0.0)
        error_L = jnp.sum(error_LXD**2, (1, 2))
        return {
            "loss": error_L.sum(),
            "tokens": acts.mask_X.sum(),
            "error_L": error_L,
            "output_LD": output_LXD.sum(1),
            "square_L": jnp.sum(output_LXD**2, (1, 2)),
            "active_L": jnp.sum((z_LXF > 0) & mask_1X1, (1, 2)),
        }

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        del causal
        tokens = rows * (columns - 1)
        weights = sum(
            spec.shape[0] * spec.shape[1] * spec.shape[2]
            for spec in [self.spec["encoder"], *self.spec["decoder"].values()]
        )
        return 6 * weights * tokens
