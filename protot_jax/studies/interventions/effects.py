"""Effect of an intervention on the probability of target words, and on the perplexity of text.

Prototype Transformer, appendix A.3. A sentence's target has probability p under the trained model
and p' under an intervention; its relative change is 100 (p' / p - 1) percent. Where p is below
`least` (the paper's 1 %), the sentence is excluded and counted.

Means over sentences, texts and draws are of log(p' / p), and are reported as the relative change of
the geometric mean, 100 (exp(mean) - 1) percent. The paper takes the mean of p' / p - 1, which
nothing bounds above: one target that becomes ten times as probable outweighs nine that vanish, and
an interval of it may end below -100 %.

1. The interventions are the four of `edits.MODES`, and `reinitialise`: the prototype's vector is
   replaced by random ones, several draws, which are the same for all prototypes.
2. Every other prototype of the model gets the same interventions: their effects are the control
   distribution of the chosen one's effect (the paper compares with a single other prototype).
3. The changes of the sentences' own perplexity and of that of validation text are measured too.

Layer, prototype and intervention, or its absence, are traced data: one program serves all, and an
intervention that changes no gate gives the same bits as the trained model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import lm_jax
from lm_jax import statistics
from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig
from lm_jax.model.mixers import Mixer
from lm_jax.model.params import ParamTree
from lm_jax.model.precision import exact_jit
from lm_jax.run import stop
from lm_jax.statistics import Interval
from lm_jax.train.objective import PAD
from protot_jax.mixers import edits
from protot_jax.studies.interventions.sentences import Cases, Sentence, locate
from protot_jax.training.saved_run import TrainedModel

REINITIALISE = "reinitialise"
MODES = (REINITIALISE, *edits.MODES)
# Rows of text in one forward pass, whose logits are in memory together.
_ROWS = 8


@dataclasses.dataclass(frozen=True)
class TextChange:
    """Perplexity of a sample of text, and its relative change in percent by mode.

    The interval is a bootstrap over rows, of the mean over draws.
    """

    perplexity: float
    tokens: int
    change: Mapping[str, Interval]


@dataclasses.dataclass(frozen=True)
class Measured:
    """Target probabilities of N sentences under every intervention, and losses in nats per token.

    Attributes:
      layer, prototype: the chosen one.
      cases: the sentences.
      least: sentences with a lower baseline are excluded.
      baseline_N, baseline_loss_N: probability and loss of the trained model.
      probability, loss: results by mode `[L, R, draws, N]`, one draw except for `reinitialise`; NaN
        where nothing was measured.
      control_draws: number of draws of the other prototypes.
      text: None without a sample of text.
    """

    layer: int
    prototype: int
    cases: Cases
    least: float
    baseline_N: np.ndarray
    baseline_loss_N: np.ndarray
    probability: Mapping[str, np.ndarray]
    loss: Mapping[str, np.ndarray]
    control_draws: int
    text: TextChange | None

    @property
    def kept_N(self) -> np.ndarray:
        """True for the sentences that are not excluded."""
        return self.baseline_N >= self.least

    def log_ratio(self, mode: str) -> np.ndarray:
        """log(p' / p) of the target's probability in nats, `[L, R, draws, N]`."""
        return np.log(self.probability[mode] / self.baseline_N)

    def log_perplexity_ratio(self, mode: str) -> np.ndarray:
        """The same of the sentence's perplexity, `[L, R, draws, N]`."""
        return self.loss[mode] - self.baseline_loss_N

    def change(self, mode: str) -> np.ndarray:
        """Relative change of the target's probability in percent, `[L, R, draws, N]`."""
        return 100.0 * (self.probability[mode] / self.baseline_N - 1.0)

    def perplexity_change(self, mode: str) -> np.ndarray:
        """Relative change of the sentence's perplexity in percent, `[L, R, draws, N]`."""
        return percent(self.log_perplexity_ratio(mode))

    def effects(self, mode: str) -> np.ndarray:
        """Change of the geometric mean over kept sentences in percent, `[L, R]`.

        Over equally many draws of each prototype.
        """
        return percent(self.log_ratio(mode)[:, :, : self.control_draws, self.kept_N].mean((2, 3)))


def percent(log_ratio: np.ndarray) -> np.ndarray:
    """The relative change in percent that a log ratio is, 100 (exp(x) - 1)."""
    return 100.0 * np.expm1(log_ratio)


@functools.partial(exact_jit, static_argnames=("cfg", "mixer"))
def token_log_probs(
    params: ParamTree,
    tokens_NS: jax.Array,
    edits: Mapping[str, Any],
    *,
    cfg: DecoderConfig,
    mixer: Mixer,
) -> jax.Array:
    """log p of each token given those before it, `[N, S - 1]`; meaningless at padding."""
    read_NT, target_NT = tokens_NS[:, :-1], tokens_NS[:, 1:]
    output = lm_jax.forward(params, read_NT, cfg, mixer=mixer, edits=edits, valid_BT=read_NT != PAD)
    log_p_NTV = jax.nn.log_softmax(output.logits)
    return jnp.take_along_axis(log_p_NTV, target_NT[..., None], axis=-1)[..., 0]


def edits_for(mode: str | None, layer: int = 0, prototype: int = 0) -> dict[str, Any]:
    """The edits of all modes, with `mode` active in `layer` and the others in no layer."""
    result = {}
    for name in edits.MODES:
        result |= edits.edit_in(layer if name == mode else -1, int(prototype), name)
    return result


def measure(
    model: TrainedModel,
    sentences: Sequence[Sentence],
    *,
    layer: int,
    prototype: int,
    draws: int = 20,
    controls: bool = True,
    control_draws: int = 5,
    least: float = 0.01,
    all_subtokens: bool = False,
    seed: int = 0,
    text_NS: np.ndarray | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> Measured:
    """Measures every intervention on one prototype, and then on all others.

    Args:
      model: a model that `load_run` gave; computed in the dtype of its parameters.
      sentences: sentences with their targets.
      layer: layer of the chosen prototype.
      prototype: index of the chosen prototype in its layer.
      draws: re-initialisations of the chosen prototype.
      controls: whether the others are measured as well; they are not if no sentence is kept.
      control_draws: re-initialisations of each of them, compared with as many of the chosen one.
      least: the lowest baseline probability that is kept.
      all_subtokens: the probability is that of all tokens of the target, not of the first only.
      seed: seed of the draws.
      text_NS: two rows of ids or more, padded with 0, whose perplexity is measured.
      advance: function of the number of evaluations done since its last call (`count_steps`).

    Raises:
      UsageError: the model has no prototypes, or not this one, or an argument is out of range.
      BadInputError: no sentence can be used.
      StoppedError: the command was asked to stop.
    """
    R = model.prototypes.num_prototypes
    edits.check(model.params, layer=layer, prototype=prototype)
    if draws < 1 or not 1 <= control_draws <= draws:
        raise UsageError(
            f"draws = {draws} and control_draws = {control_draws} must be at least 1, and "
            "control_draws at most draws"
        )
    if not 0.0 <= least < 1.0:
        raise UsageError(f"least probability {least} must be at least 0 and below 1")
    if text_NS is not None and len(text_NS) < 2:
        raise UsageError(
            f"{len(text_NS)} rows of text give no interval; sample at least 2, or none"
        )
    cases = locate(sentences, model.tokenizer, all_subtokens=all_subtokens)
    keys = jax.random.split(jax.random.key(seed), draws)
    chosen = (layer, prototype)

    def read(tokens_NS: np.ndarray, mode: str | None, at: tuple[int, int], draw: int) -> np.ndarray:
        stop.check("while intervening")
        params = model.params
        if mode == REINITIALISE:
            # Arrays, because a Python number would be a constant of the compiled program.
            row, column = (jnp.int32(index) for index in at)
            params = edits.reinitialise(params, keys[draw], layer=row, prototype=column)
        log_p_NT = token_log_probs(
            params, tokens_NS, edits_for(mode, *at), cfg=model.cfg, mixer=model.mixer
        )
        return np.asarray(log_p_NT, np.float64)

    def of_sentences(mode: str | None, at: tuple[int, int], draw: int):
        log_p_NT = read(cases.tokens_NS, mode, at, draw)
        real_NT = cases.tokens_NS[:, 1:] != PAD
        loss_N = -np.where(real_NT, log_p_NT, 0.0).sum(1) / real_NT.sum(1)
        return np.exp(np.where(cases.target_NT, log_p_NT, 0.0).sum(1)), loss_N

    L, N = model.cfg.num_layers, len(cases.sentences)
    baseline_N, baseline_loss_N = of_sentences(None, chosen, 0)
    sizes = {mode: (L, R, draws if mode == REINITIALISE else 1, N) for mode in MODES}
    probability = {mode: np.full(size, np.nan) for mode, size in sizes.items()}
    loss = {mode: np.full(size, np.nan) for mode, size in sizes.items()}
    others = []
    if controls:
        others = [other for other in itertools.product(range(L), range(R)) if other != chosen]
    if not (baseline_N >= least).any():
        advance(len(others) * len(list(plan(control_draws))))
        others = []
    for at in (chosen, *others):
        for mode, draw in plan(draws if at == chosen else control_draws):
            probability[mode][*at, draw], loss[mode][*at, draw] = of_sentences(mode, at, draw)
            advance(1)

    text = None
    if text_NS is not None:
        text = _text_change(text_NS, functools.partial(read, at=chosen), draws, seed, advance)
    return Measured(
        layer=layer,
        prototype=prototype,
        cases=cases,
        least=least,
        baseline_N=baseline_N,
        baseline_loss_N=baseline_loss_N,
        probability=probability,
        loss=loss,
        control_draws=control_draws,
        text=text,
    )


def plan(draws: int) -> Iterator[tuple[str, int]]:
    """Every mode with its draws."""
    for mode in MODES:
        yield from ((mode, draw) for draw in range(draws if mode == REINITIALISE else 1))


def count_steps(
    model: TrainedModel, *, draws: int, control_draws: int, controls: bool, text: bool
) -> int:
    """Number of evaluations of `measure`, for a progress bar."""
    edited = len(edits.MODES)
    others = model.cfg.num_layers * model.prototypes.num_prototypes - 1 if controls else 0
    return (1 + text) * (edited + draws) + others * (edited + control_draws)


def _text_change(
    text_NS: np.ndarray, read: Callable[..., np.ndarray], draws: int, seed: int, advance
) -> TextChange:
    missing = -len(text_NS) % _ROWS
    blocks = np.split(np.pad(text_NS, ((0, missing), (0, 0))), (len(text_NS) + missing) // _ROWS)
    real_NT = text_NS[:, 1:] != PAD
    row_of_token = np.nonzero(real_NT)[0]

    def losses(mode: str | None, draw: int) -> np.ndarray:
        """Losses in nats of all tokens that are not padding."""
        log_p_NT = np.concatenate([read(block, mode=mode, draw=draw) for block in blocks])
        return -log_p_NT[: len(text_NS)][real_NT]

    before = losses(None, 0)
    sums = {mode: np.zeros_like(before) for mode in MODES}
    for mode, draw in plan(draws):
        sums[mode] += losses(mode, draw) - before
        advance(1)
    change = {}
    for mode, total in sums.items():
        mean = total / (draws if mode == REINITIALISE else 1)
        result = statistics.clustered_bootstrap(mean, row_of_token, seed=seed)
        estimate, low, high = (
            float(100.0 * np.expm1(end)) for end in (result.estimate, result.low, result.high)
        )
        change[mode] = Interval(estimate, low, high, result.n)
    return TextChange(float(np.exp(before.mean())), before.size, change)
