"""What a training step minimises: an `Objective`, of which language modelling is one.

An objective is hashable, because a step is compiled once for all equal ones. A step gives it

    params    what is trained, in float32, as its `spec` declares
    frozen    what is not: the weights under adapters, a teacher; () where there is nothing
    extra     a small state that goes from step to step and into checkpoints, such as a dual
              variable; None where there is none

A batch may be cut into micro-batches. A loss is therefore returned as a share: what a micro-batch
adds to the number of the whole batch, whose `totals` are counted before.
"""

from collections.abc import Callable, Mapping
import dataclasses
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.model import params as params_lib
from lm_jax.model.attention import Attend, Fused, fused, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward, param_spec
from lm_jax.model.flops import Causal, forward_flops
from lm_jax.model.mixers import ATTENTION, AttentionMixer, Mixer
from lm_jax.model.params import ParamSpec, ParamTree
from lm_jax.run.plain import to_plain
from lm_jax.text.examples import VOID
from lm_jax.train import losses, optim

# What rows are filled up with where the tokenizer has an id for that.
PAD = 0

Numbers = Mapping[str, jax.Array]


class Cut(NamedTuple):
    """What is read of a batch of rows, and what is to be predicted at each of its places."""

    read_BT: jax.Array
    valid_BT: jax.Array
    target_BT: jax.Array
    counted_BT: jax.Array


Cutting = Callable[[jax.Array], Cut]


def next_token(tokens_BS: jax.Array) -> Cut:
    """Each of `[:, 1:]` is predicted from what stands before it; rows are filled with `PAD`."""
    read_BT, target_BT = tokens_BS[:, :-1], tokens_BS[:, 1:]
    return Cut(read_BT, read_BT != PAD, target_BT, target_BT != PAD)


def next_token_or_void(tokens_BS: jax.Array) -> Cut:
    """As `next_token`, of rows that are filled with `VOID`."""
    held_BS = tokens_BS != VOID
    tokens_BS = jnp.where(held_BS, tokens_BS, 0)
    return Cut(tokens_BS[:, :-1], held_BS[:, :-1], tokens_BS[:, 1:], held_BS[:, 1:])


def places(cutting: Cutting, rows: int, columns: int) -> int:
    """How many places of each row a model reads."""
    return jax.eval_shape(cutting, jax.ShapeDtypeStruct((rows, columns), "int32")).read_BT.shape[1]


def nll(output: Output, params: ParamTree, cfg: DecoderConfig, cut: Cut) -> jax.Array:
    """The sum of -log p over the places of each row that count, float32 `[B]`, in nats.

    `output` and `params` are those of the forward pass over `cut`.
    """
    model = losses.Predictor(output.hidden, params)
    loss_BT = losses.token_nll(model, cut.target_BT, cfg)
    return jnp.sum(jnp.where(cut.counted_BT, loss_BT, 0.0), axis=1)


class Objective(Protocol):
    """What `step.make_train_step` and `loop.train` are told of the job."""

    @property
    def spec(self) -> ParamTree:
        """The declaration of what is trained."""
        ...

    @property
    def dtype(self) -> str:
        """What is computed in: "float32" or "bfloat16"."""
        ...

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the metrics of a step besides those that every job has."""
        ...

    def describe(self) -> dict[str, Any]:
        """Plain settings, to which a run's checkpoints are bound."""
        ...

    def start(self) -> Any:
        """The extra state before the first step."""
        ...

    def totals(self, tokens_BS: jax.Array) -> Numbers:
        """What the shares of a whole batch are divided by, none of them 0."""
        ...

    def shares(
        self,
        params: ParamTree,
        frozen: Any,
        extra: Any,
        tokens_BS: jax.Array,
        totals: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        """The shares of what is minimised, and of `loss` (nats per token) and `columns`."""
        ...

    def update(self, extra: Any, metrics: Numbers) -> tuple[Any, Numbers]:
        """The extra state after a step with these metrics, and the `columns` that are no shares."""
        ...

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        """Model FLOPs of one update on a batch `[rows, columns]`, forward and backward."""
        ...

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        """Sums over a batch: `loss`, in nats, `tokens`, and others by name."""
        ...


def dtype_problems(dtype: str) -> list[str]:
    """What is wrong with a dtype to compute in: nothing, or one sentence."""
    known = dtype in ("float32", "bfloat16")
    return [] if known else [f"dtype = {dtype!r} must be 'float32' or 'bfloat16'"]


def is_cast(path: str, spec: ParamSpec) -> bool:
    """True for what is computed with in the dtype of the run: matrices, and biases added to them.

    The biases of norms, `.../bias`, stay as they are.
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
    cutting: Cutting = next_token,
    dropout: float = 0.0,
    rng: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The sum of -log p over the tokens to predict that are not padding, and their number.

    Args:
      params: in the dtypes of the computation.
      tokens_BS: rows of ids.
      cfg: the model.
      mixer: its token mixer.
      cutting: what is read of a row and what predicted.
      dropout: the rate.
      rng: key for dropout and for mixers that draw.
    """
    cut = cutting(tokens_BS)
    output = forward(
        params,
        cut.read_BT,
        cfg,
        mixer=mixer,
        attend=_attend(mixer, dropout),
        dropout=dropout,
        rng=rng,
        valid_BT=cut.valid_BT,
    )
    model = losses.Predictor(output.hidden, params)
    sums = losses.summed(model, cut.target_BT, cut.counted_BT, cfg)
    return sums.minimised, jnp.sum(cut.counted_BT)


def _attend(mixer: Mixer, dropout: float) -> Attend | Fused:
    """Softmax; on a CPU without whole scores, unless the mixer drops from the pattern."""
    if jax.default_backend() != "cpu" or not isinstance(mixer, AttentionMixer):
        return softmax
    return softmax if mixer.pattern_dropout and dropout > 0 else fused(softmax, "kernels")


@dataclasses.dataclass(frozen=True)
class LanguageModelling:
    """The mean negative log likelihood of every next token that is not padding.

    Master weights are float32. Under bfloat16 compute what `casts` chooses is cast inside the loss,
    so that gradients arrive in float32; vectors and scalars (norms, temperatures, decays) stay
    float32.

    Raises:
      UsageError: for a dtype or a dropout that cannot be.
    """

    cfg: DecoderConfig
    mixer: Mixer = ATTENTION
    dtype: str = "float32"
    dropout: float = 0.0
    casts: optim.Choice = is_cast
    cutting: Cutting = next_token
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

    def describe(self) -> dict[str, Any]:
        return {
            "model": to_plain(self.cfg),
            "mixer": described(self.mixer),
            "language_modelling": {"dtype": self.dtype, "dropout": self.dropout},
        } | ({} if self.cutting is next_token else {"cutting": self.cutting.__qualname__})

    def start(self) -> None:
        return None

    def totals(self, tokens_BS: jax.Array) -> Numbers:
        # A batch of padding alone has a loss of zero, not of 0 / 0.
        return {"tokens": jnp.maximum(jnp.sum(self.cutting(tokens_BS).counted_BT), 1)}

    def shares(
        self,
        params: ParamTree,
        frozen: Any,
        extra: Any,
        tokens_BS: jax.Array,
        totals: Numbers,
        rng: jax.Array,
    ) -> tuple[jax.Array, Numbers]:
        del frozen, extra
        total, _ = token_loss(
            self._low(params),
            tokens_BS,
            self.cfg,
            self.mixer,
            cutting=self.cutting,
            dropout=self.dropout,
            rng=rng,
        )
        loss = total / totals["tokens"]
        return loss, {"loss": loss}

    def update(self, extra: Any, metrics: Numbers) -> tuple[Any, Numbers]:
        del metrics
        return extra, {}

    def flops(self, rows: int, columns: int, causal: Causal) -> int:
        read = places(self.cutting, rows, columns)
        # The gradient of a product is two products, by either factor.
        return 3 * rows * forward_flops(self.cfg, self.mixer, read, causal=causal).total

    def evaluate(self, params: ParamTree, frozen: Any, tokens_BS: jax.Array) -> Numbers:
        del frozen
        total, count = token_loss(
            self._low(params), tokens_BS, self.cfg, self.mixer, cutting=self.cutting
        )
        return {"loss": total, "tokens": count}

    def _low(self, params: ParamTree) -> dict[str, Any]:
        return cast_params(params, self.spec, self.dtype, self.casts)


def described(mixer: Mixer) -> dict[str, Any]:
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
