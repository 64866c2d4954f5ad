"""The Jacobian lens: what a residual stream will have become at the last layer, on average.

With h_l,t the output of block l at token t, h that of the last block, and P the tokens of a prompt
but its first few, where attention sinks are, and its last, which predicts nothing,

    J_l = mean over prompts of 1 / |P| sum over t in P, t' in P, t' >= t of d h_t' / d h_l,t

a matrix [D, D] of each layer whose rows are outputs. `logits` reads J_l h_l by the model's own last
norm and unembedding; J_l^T w is the direction in layer l that says the token of w. The derivative
is the true one, through softmax, norms and MLPs. The definition is that of the Jacobian lens of
Neuronpedia and TransformerLens.

A row of J costs one backward pass of a prompt, which gives it for all layers. Each prompt gives k
rows, other ones than the prompt before it, in turn: every row is the mean over the prompts that had
it, so that the estimate is unbiased, and what is left is the variance between prompts alone. Random
signs in place of rows would add (D - 1) / k times the square of J for each prompt.

    lens = jacobian_lens.fit(model, prompts)
    logits_BTV = lens.logits(model.params, model.cfg, h_BTD, layer=12)

`lm_jax.weights.lenses` keeps it as a file.
"""

from collections.abc import Callable, Iterable, Sequence
import dataclasses
import functools
from typing import Any, Protocol, runtime_checkable

from flax import struct
import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.inspect.run import logit_lens
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward
from lm_jax.model.edits import Add
from lm_jax.model.layers import unembedding
from lm_jax.model.mixers import ATTENTION, Mixer
from lm_jax.model.precision import exact_jit
from lm_jax.model.sites import keep

# Rows of J of a prompt, and tokens at its begin that are left out.
ROWS, SKIPPED = 16, 16


class Subject(Protocol):
    """A model: its parameters and its config. A `mixer` other than attention is named in `fit`."""

    params: Any
    cfg: DecoderConfig


@runtime_checkable
class Runs(Protocol):
    """A pytree that runs a model in a way of its own, such as one with gates."""

    def forward(self, tokens_BT: jax.Array, valid_BT: jax.Array, **options: Any) -> Output:
        """The forward pass; options are those of `lm_jax.forward`."""
        ...


@struct.dataclass
class _Decoder:
    """A decoder and its mixer (`Runs`)."""

    params: Any
    cfg: DecoderConfig = struct.field(pytree_node=False)
    mixer: Mixer = struct.field(pytree_node=False)

    def forward(self, tokens_BT: jax.Array, valid_BT: jax.Array, **options: Any) -> Output:
        return forward(
            self.params, tokens_BT, self.cfg, mixer=self.mixer, valid_BT=valid_BT, **options
        )


def runs(model: Subject, mixer: Mixer = ATTENTION) -> Any:
    """The model as what runs it: itself, if it has a `forward` of its own.

    Raises:
      UsageError: it has gates, whose own derivative is that of training.
    """
    if getattr(model, "gates", None) is not None:
        raise UsageError(
            "lens: the model has gates, which a small step neither opens nor closes; hold them, "
            "HeldGates(CircuitModel.of(model)) of sparse_jax.circuits.runs"
        )
    return model if isinstance(model, Runs) else _Decoder(model.params, model.cfg, mixer)


def check_length(cfg: DecoderConfig, length: int, skipped: int) -> None:
    """Raises UsageError where prompts of this length have no token that counts, or do not fit."""
    if not skipped + 2 <= length <= cfg.max_length:
        raise UsageError(
            f"lens: length = {length} must be {skipped + 2} (two more than skipped) to "
            f"{cfg.max_length}, the context of the model"
        )


def counted(tokens_1T: jax.Array, count: jax.Array | int, skipped: int) -> jax.Array:
    """Which tokens the lens is about `[T]`, 1 or 0."""
    at_T = jnp.arange(tokens_1T.shape[1])
    return ((at_T >= skipped) & (at_T < count - 1)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True, eq=False)
class JacobianLens:
    """Averaged Jacobians of all layers but the last, whose own is the identity.

    Attributes:
      matrix_SDD: J of the outputs of blocks 0 to S - 1, float32; rows are outputs.
      layers: number of the model's layers, S + 1.
      prompts: number of prompts.
      rows: number of rows that each prompt gave; D for all of them.
      skipped: first tokens that were left out.
      spread_S: relative standard error of J by layer, estimated from two halves of the prompts;
        NaN where no row had two prompts, or where a file does not say it.
      model: name of the model.
    """

    matrix_SDD: np.ndarray
    layers: int
    prompts: int
    rows: int
    skipped: int
    spread_S: np.ndarray
    model: str = ""

    def transport(self, h: jax.Array, layer: int) -> jax.Array:
        """J h of the output h `[..., D]` of a block; of the last h itself.

        Raises:
          UsageError: there is no such block, or h has another width.
        """
        self._check(layer)
        if h.shape[-1] != self.matrix_SDD.shape[-1]:
            raise UsageError(
                f"lens: of width {self.matrix_SDD.shape[-1]}, and the stream has {h.shape[-1]}; "
                "take the lens of this model"
            )
        if layer == self.layers - 1:
            return h
        matrix_DD = jnp.asarray(self.matrix_SDD[layer], h.dtype)
        return jnp.einsum("...D,ED->...E", h, matrix_DD, precision="highest")

    def logits(self, params: Any, cfg: DecoderConfig, h_BTD: jax.Array, layer: int) -> jax.Array:
        """Logits `[B, T, V]` that the output of a block is on its way to.

        Args:
          params: parameters of the model.
          cfg: configuration of the model.
          h_BTD: the output of the block.
          layer: number of the block.

        Raises:
          UsageError: as `transport`.
        """
        return logit_lens(params, self.transport(h_BTD, layer), cfg)

    def direction(self, params: Any, cfg: DecoderConfig, token: int, layer: int) -> jax.Array:
        """The direction `[D]` in the output of a block that says a token, J^T w.

        Args:
          params: parameters of the model.
          cfg: configuration of the model.
          token: id of the token.
          layer: number of the block.

        Raises:
          UsageError: as `transport`.
        """
        self._check(layer)
        w_D = unembedding(params, cfg)[token].astype(jnp.float32)
        if layer == self.layers - 1:
            return w_D
        return jnp.einsum("ED,E->D", self.matrix_SDD[layer], w_D, precision="highest")

    def _check(self, layer: int) -> None:
        if not 0 <= layer < self.layers:
            raise UsageError(f"lens: layer = {layer} is outside 0..{self.layers - 1}")


@dataclasses.dataclass(eq=False)
class Sums:
    """What prompts have given so far; a fit goes on from here.

    Attributes:
      total_2SDD: sums of rows over prompts, of which every other visit of a row is in one half.
      visits_D: number of prompts that gave each row.
      prompts: number of prompts.
    """

    total_2SDD: np.ndarray
    visits_D: np.ndarray
    prompts: int = 0

    @classmethod
    def empty(cls, cfg: DecoderConfig) -> "Sums":
        """No prompt.

        Raises:
          UsageError: the model has one layer, whose output is already that of the last block.
        """
        S, D = cfg.num_layers - 1, cfg.hidden_size
        if S < 1:
            raise UsageError("lens: a model of one layer has no layer before its last")
        return cls(np.zeros((2, S, D, D), np.float32), np.zeros(D, np.int64))

    def rows(self, count: int) -> np.ndarray:
        """The rows that the next prompt gives."""
        D = len(self.visits_D)
        return ((self.prompts * count + np.arange(count)) % D).astype(np.int32)

    def add(self, row_K: np.ndarray, value_KSD: np.ndarray) -> None:
        """Takes the rows of one prompt."""
        for row, value_SD in zip(row_K, value_KSD, strict=True):
            self.total_2SDD[self.visits_D[row] % 2, :, row] += value_SD
            self.visits_D[row] += 1
        self.prompts += 1

    def lens(self, *, rows: int, skipped: int, model: str = "") -> JacobianLens:
        """The lens so far.

        Raises:
          UsageError: some row has no prompt yet.
        """
        D, S = len(self.visits_D), self.total_2SDD.shape[1]
        if not self.visits_D.all():
            raise UsageError(
                f"lens: {self.prompts} prompts of {rows} rows each gave "
                f"{int((self.visits_D > 0).sum())} of {D} rows; give at least {-(-D // rows)} "
                "prompts that are long enough"
            )
        visits_2D1 = np.stack([-(-self.visits_D // 2), self.visits_D // 2])[:, None, :, None]
        total_SDD = self.total_2SDD.sum(0) / self.visits_D[None, :, None]
        spread_S = np.full(S, np.nan)
        if (self.visits_D > 1).all():
            first, second = self.total_2SDD / visits_2D1
            spread_S = np.linalg.norm(first - second, axis=(1, 2)) / np.linalg.norm(
                first + second, axis=(1, 2)
            )
        return JacobianLens(total_SDD, S + 1, self.prompts, rows, skipped, spread_S, model)


def fit(
    model: Subject,
    prompts: Iterable[Sequence[int]],
    *,
    length: int = 128,
    rows: int = ROWS,
    skipped: int = SKIPPED,
    mixer: Mixer = ATTENTION,
    sums: Sums | None = None,
    after: Callable[[Sums], None] | None = None,
    name: str = "",
) -> JacobianLens:
    """The lens of a model, from prompts; those with too few tokens are left out.

    Args:
      model: a model; one that is a pytree with a `forward` of its own (`Runs`) is run by that.
      prompts: token ids of each prompt.
      length: number of tokens that are read of a prompt.
      rows: number of rows of J that a prompt gives.
      skipped: first tokens of a prompt that are left out.
      mixer: token mixer of the model.
      sums: what earlier prompts gave, which `prompts` begin with: as many are passed over.
      after: function that is called with what all prompts gave so far, after each.
      name: name of the model.

    Raises:
      UsageError: too few prompts for every row, or settings that leave no token.
    """
    cfg = model.cfg
    check_length(cfg, length, skipped)
    if not 1 <= rows <= cfg.hidden_size:
        raise UsageError(f"lens: rows = {rows} must be 1 to {cfg.hidden_size}")
    sums = Sums.empty(cfg) if sums is None else sums
    own = runs(model, mixer)
    long_enough = (ids for ids in prompts if len(ids) >= skipped + 2)
    done = sums.prompts
    for number, ids in enumerate(long_enough):
        if number < done:
            continue
        count, row_K = min(len(ids), length), sums.rows(rows)
        tokens_1T = np.zeros((1, length), np.int32)
        tokens_1T[0, :count] = ids[:count]
        value_KSD = prompt_rows(own, tokens_1T, count, row_K, skipped=skipped)
        sums.add(row_K, np.asarray(value_KSD))
        if after is not None:
            after(sums)
    return sums.lens(rows=rows, skipped=skipped, model=name)


@functools.partial(exact_jit, static_argnames="skipped")
def prompt_rows(
    model: Any,
    tokens_1T: jax.Array,
    count: jax.Array | int,
    row_K: jax.Array,
    *,
    skipped: int = SKIPPED,
) -> jax.Array:
    """Rows of the Jacobian of one prompt `[K, S, D]`, of all blocks but the last.

    Args:
      model: what runs the model (`runs`).
      tokens_1T: ids, padded on the right.
      count: number of tokens that are no padding.
      row_K: numbers of the rows, coordinates of the last block's output.
      skipped: first tokens that are left out.
    """
    T, L, D = tokens_1T.shape[1], model.cfg.num_layers, model.cfg.hidden_size
    counted_T = counted(tokens_1T, count, skipped)
    dtype = jnp.float32

    def last_stream(offset_LTD: jax.Array) -> jax.Array:
        out = model.forward(
            tokens_1T,
            (jnp.arange(T) < count)[None],
            edits={"resid_post": Add(offset_LTD[:, None])},
            record={"final_input": keep},
        )
        return out.records["final_input"][0].astype(dtype)

    _, pullback = jax.vjp(last_stream, jnp.zeros((L, T, D), dtype))

    def one(row: jax.Array) -> jax.Array:
        cotangent_TD = counted_T[:, None] * (jnp.arange(D) == row).astype(dtype)[None]
        (gradient_LTD,) = pullback(cotangent_TD)
        return jnp.einsum("LTD,T->LD", gradient_LTD[:-1], counted_T) / counted_T.sum()

    return jax.vmap(one)(row_K)
