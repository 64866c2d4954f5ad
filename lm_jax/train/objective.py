"""Training objectives: the loss that a step minimises, and the language modelling objective.

An objective is hashable, because a step is compiled once for all equal ones. A step gives it

    params       trained parameters in float32, as its `spec` declares
    frozen       parameters that are not trained: the weights under adapters, a teacher; () if none
    aux_state    a small state carried from step to step and into checkpoints, such as a dual
                 variable; None if there is none

Gradient accumulation splits a batch into micro-batches. A loss is therefore returned as a term:
what a micro-batch adds to the mean over the whole batch, whose `normalizers` (counts of tokens) are
computed first.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.attention import Attend, Fused, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward, param_spec
from lm_jax.model.flops import Causal, forward_flops
from lm_jax.model.mixers import ATTENTION, AttentionMixer, Mixer
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.model.sites import Reducer
from lm_jax.run.config import to_plain
from lm_jax.text.examples import IGNORE_INDEX
from lm_jax.train import losses, optim
from lm_jax.train.attention import fastest_softmax

# The id that pads rows, where the tokenizer has a padding token.
PAD = 0

Numbers = Mapping[str, jax.Array]


class LMBatch(NamedTuple):
    """Model inputs, next-token targets and masks of one batch, each `[B, T]`.

    `input_mask_BT` is false at padding, `loss_mask_BT` at targets that the loss leaves out.
    `document_BT` numbers the documents that are joined in a row and each read by itself, or None.
    """

    input_BT: jax.Array
    input_mask_BT: jax.Array
    target_BT: jax.Array
    loss_mask_BT: jax.Array
    document_BT: jax.Array | None = None


MakeBatch = Callable[[jax.Array], LMBatch]


def next_token_batch(tokens_BS: jax.Array, *, padding: int = PAD) -> LMBatch:
    """Inputs `[:, :-1]` and targets `[:, 1:]` of rows padded with the id `padding`."""
    held_BS = tokens_BS != padding
    # A padding id outside the vocabulary becomes token 0, which every mask leaves out.
    tokens_BS = jnp.where(held_BS, tokens_BS, 0) if padding < 0 else tokens_BS
    return LMBatch(tokens_BS[:, :-1], held_BS[:, :-1], tokens_BS[:, 1:], held_BS[:, 1:])


def ignore_index_batch(tokens_BS: jax.Array) -> LMBatch:
    """`next_token_batch` of rows padded with `IGNORE_INDEX`, for tokenizers without padding."""
    return next_token_batch(tokens_BS, padding=IGNORE_INDEX)


@dataclasses.dataclass(frozen=True)
class PackedBatch:
    """`next_token_batch` of rows into which documents were joined, each of them read by itself.

    Attributes:
      end: id of the token that ends every document. No token is predicted from it, because the next
        is of another document.
    """

    end: int

    def __call__(self, tokens_BS: jax.Array) -> LMBatch:
        batch = next_token_batch(tokens_BS)
        ends_BT = batch.input_BT == self.end
        # A document has its own end.
        document_BT = jnp.cumsum(ends_BT, axis=1) - ends_BT
        return batch._replace(loss_mask_BT=batch.loss_mask_BT & ~ends_BT, document_BT=document_BT)


def input_length(make_batch: MakeBatch, rows: int, columns: int) -> int:
    """The number of tokens of each row that the model reads."""
    return jax.eval_shape(
        make_batch, jax.ShapeDtypeStruct((rows, columns), "int32")
    ).input_BT.shape[1]


def nll(output: Output, params: ParamTree, cfg: DecoderConfig, batch: LMBatch) -> jax.Array:
    """The negative log likelihood of each row's targets, float32 `[B]`, in nats.

    `output` and `params` are those of the forward pass over `batch`.
    """
    model = losses.Predictor(output.hidden, params)
    loss_BT = losses.token_nll(model, batch.target_BT, cfg)
    return jnp.sum(jnp.where(batch.loss_mask_BT, loss_BT, 0.0), axis=1)


class Objective(Protocol):
    """The interface of a training objective to `step.make_train_step` and `loop.train`."""

    @property
    def spec(self) -> ParamTree:
        """The declaration of the trained parameters."""
        ...

    @property
    def dtype(self) -> str:
        """The dtype of the computation: "float32" or "bfloat16"."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the objective's own metrics of a step."""
        ...

    def metadata(self) -> dict[str, Any]:
        """Plain settings of the objective, to which a run's checkpoints are bound."""
        ...

    def init_state(self) -> Any:
        """The auxiliary state before the first step."""
        ...

    def normalizers(self, tokens_BS: jax.Array) -> Numbers:
        """The counts that the loss terms of a whole batch are divided by, none of them 0."""
        ...

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Any,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        """A micro-batch's term of the minimised loss, of `loss` (nats per token) and `columns`."""
        ...

    def update(self, aux_state: Any, metrics: Numbers) -> tuple[Any, Numbers]:
        """The auxiliary state after a step with these metrics, and the `columns` it computes."""
        ...

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        """Model FLOPs of one update on a batch `[rows, columns]`, forward and backward."""
        ...

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        """Sums over a batch: `loss`, in nats, `tokens`, and others by name."""
        ...


def dtype_problems(dtype: str) -> list[str]:
    """A list with one sentence if the dtype of the computation is unsupported, else empty."""
    known = dtype in ("float32", "bfloat16")
    return [] if known else [f"dtype = {dtype!r} must be 'float32' or 'bfloat16'"]


def is_cast(path: str, spec: ParamSpec) -> bool:
    """True for parameters that are cast to the run's dtype: matrices, and biases added to them.

    The biases of norms, `.../bias`, keep their dtype.
    """
    return optim.axes_of_one_layer(spec) >= 2 or path.endswith("_bias")


def cast_params(
    params: ParamTree, spec: ParamTree, dtype: Any, casts: optim.Choice = is_cast
) -> dict[str, Any]:
    """`params` with the chosen leaves in `dtype`."""
    chosen = params_lib.tree_from_paths(optim.choose(casts, spec))
    return jax.tree.map(lambda cast, p: p.astype(dtype) if cast else p, chosen, dict(params))


def token_loss(
    params: ParamTree,
    tokens_BS: jax.Array,
    cfg: DecoderConfig,
    mixer: Mixer,
    *,
    make_batch: MakeBatch = next_token_batch,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sum of -log p over the targets that are not padding, and their number.

    Args:
      params: parameters, in the dtypes of the computation.
      tokens_BS: rows of ids.
      cfg: the model.
      mixer: the model's token mixer.
      make_batch: rows of ids to inputs, targets and masks.
      dropout: the rate.
      rng: key for dropout and for random mixers.
    """
    batch = make_batch(tokens_BS)
    output = read_batch(params, batch, cfg, mixer, dropout=dropout, rng=rng)
    model = losses.Predictor(output.hidden, params)
    sums = losses.summed(model, batch.target_BT, batch.loss_mask_BT, cfg)
    return sums.minimised, jnp.sum(batch.loss_mask_BT)


def read_batch(
    params: ParamTree,
    batch: LMBatch,
    cfg: DecoderConfig,
    mixer: Mixer,
    *,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
    record: Mapping[str, Reducer] | None = None,
) -> Output:
    """The forward pass over a batch, with the fastest softmax for it; arguments as `forward`."""
    return forward(
        params,
        batch.input_BT,
        cfg,
        mixer=mixer,
        attend=training_softmax(params, cfg, mixer, dropout),
        dropout=dropout,
        rng=rng,
        valid_BT=batch.input_mask_BT,
        document_BT=batch.document_BT,
        record=record,
    )


def training_softmax(
    params: ParamTree, cfg: DecoderConfig, mixer: Mixer, dropout: float = 0.0
) -> Attend | Fused:
    """Softmax without whole scores, unless the mixer drops from the pattern."""
    if not isinstance(mixer, AttentionMixer) or (mixer.pattern_dropout and dropout > 0):
        return softmax
    widths = [each.head_dim for each in cfg.layers if each.head_dim is not None]
    dtype = params["embed"]["tokens"].dtype
    return fastest_softmax(dtype, [cfg.head_dim, *widths], cfg.score_softcap)


class Stateless:
    """Base of an objective that has neither a state nor metrics of its own."""

    @property
    def columns(self) -> tuple[str, ...]:
        return ()

    def init_state(self) -> None:
        return None

    def update(self, aux_state: Any, metrics: Numbers) -> tuple[Any, Numbers]:
        del metrics
        return aux_state, {}


@dataclasses.dataclass(frozen=True)
class LanguageModelling(Stateless):
    """The mean negative log likelihood of every next token that is not padding.

    Master weights are float32. Under bfloat16 the parameters that `casts` selects are cast inside
    the loss, so that gradients arrive in float32; vectors and scalars (norms, temperatures, decays)
    stay float32.

    Raises:
      UsageError: for an unsupported dtype or dropout.
    """

    cfg: DecoderConfig
    mixer: Mixer = ATTENTION
    dtype: str = "float32"
    dropout: float = 0.0
    casts: optim.Choice = is_cast
    make_batch: MakeBatch = next_token_batch
    columns: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = []
        if not 0 <= self.dropout < 1:
            problems.append(f"dropout = {self.dropout} must be at least 0 and below 1")
        problems += dtype_problems(self.dtype)
        if problems:
            raise UsageError("; ".join(problems))

    @property
    def spec(self) -> ParamTree:
        return param_spec(self.cfg, self.mixer)

    def metadata(self) -> dict[str, Any]:
        return {
            "model": to_plain(self.cfg),
            "mixer": mixer_metadata(self.mixer),
            "language_modelling": {"dtype": self.dtype, "dropout": self.dropout},
        } | (
            {}
            if self.make_batch is next_token_batch
            else {"make_batch": getattr(self.make_batch, "__qualname__", repr(self.make_batch))}
        )

    def normalizers(self, tokens_BS: jax.Array) -> Numbers:
        # A batch of padding alone has a loss of zero, not of 0 / 0.
        return {"tokens": jnp.maximum(jnp.sum(self.make_batch(tokens_BS).loss_mask_BT), 1)}

    def loss_terms(
        self,
        params: ParamTree,
        frozen: Any,
        aux_state: Any,
        tokens_BS: jax.Array,
        normalizers: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del frozen, aux_state
        total, _ = token_loss(
            self._low(params),
            tokens_BS,
            self.cfg,
            self.mixer,
            make_batch=self.make_batch,
            dropout=self.dropout,
            rng=rng,
        )
        loss = total / normalizers["tokens"]
        return loss, {"loss": loss}

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        read = input_length(self.make_batch, rows, columns)
        # The gradient of a product is two products, by either factor.
        return 3 * rows * forward_flops(self.cfg, self.mixer, read, causal=causal).total

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        del frozen
        total, count = token_loss(
            self._low(params), tokens_BS, self.cfg, self.mixer, make_batch=self.make_batch
        )
        return {"loss": total, "tokens": count}

    def _low(self, params: ParamTree) -> dict[str, Any]:
        return cast_params(params, self.spec, self.dtype, self.casts)


def mixer_metadata(mixer: Mixer) -> dict[str, Any]:
    """A mixer as plain settings: its class and its fields, a function by its full name."""
    fields: dict[str, Any] = {}
    if dataclasses.is_dataclass(mixer):
        fields = {f.name: getattr(mixer, f.name) for f in dataclasses.fields(mixer)}
    named = {
        name: f"{value.__module__}.{getattr(value, '__qualname__', type(value).__qualname__)}"
        if callable(value)
        else value
        for name, value in fields.items()
    }
    return to_plain({"class": type(mixer).__qualname__} | named)
