"""Parameters and forward FLOPs of the models of a config, side by side.

    python -m protot_jax.count --config=configs/protot/throughput.py

A multiplication counts one and an addition counts one. Counted are products with weights, scores
and weighted sums of attention over all T x T pairs, though causality masks half of them,
convolutions, recurrences and logits. Left out, as small beside these, are embedding lookups, norms,
softmax, activations, rotations, gates and residual additions.

The numbers of Table 13 of the Prototype Transformer's paper fit these terms: ours are 0.23 % above
for ProtoT, 0.12 % below for LLaMA and 0.41 % above for Mamba. Its caption says forward and
backward; the numbers are of forward alone.

With D the width, T the context and V the vocabulary, FLOPs of one token are, in one layer,

    MLP        2 * 3 D F

    attention  2 * (2 N + 2 K) D H        queries and output, keys and values
             + 2 * 2 N H T                scores, weighted sum of values

    ProtoT     2 * (2 D R + D^2 + 2 D E)  logits of both gates, W, values in and out
             + 5 R E                      state: decay, write, add; read
             + 2 * C E                    convolution, in the first layers alone
                                          the first layer reads with its write gate: no W, one logit

    Mamba      2 * 3 D I                  input, gate, output
             + 2 * (C I + 2 I X + 2 I J)  convolution, step size down and up, B and C
             + 6 I J                      state: step times rate, decay, write, add; read

    DeltaNet   2 * 4 D N H                queries, keys, values, output
             + 2 * (D N + 3 C N H)        beta, convolutions
             + 6 N H^2                    state: what the key holds, write, add; read

and 2 * D V for the logits. Letters are those of the mixers' parameters.
"""

from collections.abc import Sequence
import dataclasses

from lm_jax import launch
from lm_jax.config import DecoderConfig
from lm_jax.decoder import count_params
from lm_jax.errors import UsageError, nearest
from lm_jax.mixers import AttentionMixer, Mixer
from protot_jax.deltanet import DeltaNetMixer
from protot_jax.mamba import MambaMixer
from protot_jax.mixer import PrototypeMixer
from protot_jax.models import MODELS, make


@dataclasses.dataclass(frozen=True)
class CountConfig:
    """What is counted.

    Attributes:
      hidden_size: the width of every model.
      num_layers: blocks of every model.
      vocab_size: tokens.
      context: tokens of one sample.
      models: names of `models.MODELS`.
      tied: the models that read logits through the token embedding.
    """

    hidden_size: int
    num_layers: int
    vocab_size: int
    context: int
    models: tuple[str, ...]
    tied: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        problems = [
            f"config.{name} = {getattr(self, name)} must be at least 1"
            for name in ("hidden_size", "num_layers", "vocab_size", "context")
            if getattr(self, name) < 1
        ]
        if not self.models:
            problems.append("config.models is empty; name at least one model")
        problems += [
            f"config.{field} names {name!r}, which is no model{nearest(name, MODELS)}"
            for field in ("models", "tied")
            for name in getattr(self, field)
            if name not in MODELS
        ]
        if problems:
            raise UsageError("; ".join(problems))


@dataclasses.dataclass(frozen=True)
class Flops:
    """Forward FLOPs of one sample, by where they are spent."""

    mixer: int
    mlp: int
    logits: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.mixer + self.mlp + self.logits


@dataclasses.dataclass(frozen=True)
class Count:
    """One model's parameters, those that an output depends on, and its FLOPs."""

    name: str
    cfg: DecoderConfig
    parameters: int
    in_use: int
    flops: Flops


def count(config: CountConfig) -> list[Count]:
    """Counts every model of the config."""
    counts = []
    for name in config.models:
        cfg, mixer = make(
            name,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            context=config.context,
            tie_embeddings=name in config.tied,
        )
        parameters = count_params(cfg, mixer=mixer)
        unused = mixer.unused(cfg) if isinstance(mixer, PrototypeMixer) else 0
        found = flops(cfg, mixer, config.context)
        counts.append(Count(name, cfg, parameters, parameters - unused, found))
    return counts


def flops(cfg: DecoderConfig, mixer: Mixer, tokens: int) -> Flops:
    """Forward FLOPs of one sequence of `tokens`, by the formulae at the head of this file."""
    match mixer:
        case AttentionMixer():
            per_token = cfg.num_layers * _attention(cfg, tokens)
        case PrototypeMixer():
            per_token = _prototypes(cfg, mixer)
        case MambaMixer():
            per_token = cfg.num_layers * _mamba(cfg, mixer)
        case DeltaNetMixer():
            per_token = cfg.num_layers * _deltanet(cfg, mixer)
        case _:
            raise TypeError(f"there is no formula for a {type(mixer).__name__}; add it here")
    matrices = 3 if cfg.gated_mlp else 2
    return Flops(
        mixer=tokens * per_token,
        mlp=tokens * cfg.num_layers * 2 * matrices * cfg.hidden_size * cfg.mlp_size,
        logits=tokens * 2 * cfg.hidden_size * cfg.vocab_size,
    )


def _attention(cfg: DecoderConfig, T: int) -> int:
    D, N, K, H = cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    return 2 * (2 * N + 2 * K) * D * H + 2 * 2 * N * H * T


def _prototypes(cfg: DecoderConfig, mixer: PrototypeMixer) -> int:
    D, R, E, C = cfg.hidden_size, mixer.num_prototypes, mixer.value_size(cfg), mixer.conv_kernel
    layer = 2 * (2 * D * R + D * D + 2 * D * E) + 5 * R * E
    shared = 2 * (D * R + D * D) if mixer.shared_routing else 0
    convolved = min(mixer.conv_layers, cfg.num_layers)
    return cfg.num_layers * layer - shared + convolved * 2 * C * E


def _mamba(cfg: DecoderConfig, mixer: MambaMixer) -> int:
    D, J, X, C = cfg.hidden_size, mixer.state_size, mixer.rank(cfg), mixer.conv_kernel
    return mixer.inner_size(cfg) * (2 * 3 * D + 2 * (C + 2 * X + 2 * J) + 6 * J)


def _deltanet(cfg: DecoderConfig, mixer: DeltaNetMixer) -> int:
    D, N, H, C = cfg.hidden_size, cfg.num_heads, cfg.head_dim, mixer.conv_kernel
    return 2 * 4 * D * N * H + 2 * (D * N + 3 * C * N * H) + 6 * N * H * H


COLUMNS = (
    *("model", "tied", "MLP size", "parameters", "in use"),
    *("MFLOPs", "of mixers", "of MLPs", "of logits"),
)


def table(config: CountConfig, counts: Sequence[Count]) -> str:
    """The counts as lines of text, one model each."""
    rows: list[tuple[str, ...]] = [COLUMNS]
    for each in counts:
        spent = each.flops
        rows.append(
            (
                each.name,
                "yes" if each.cfg.tie_embeddings else "no",
                f"{each.cfg.mlp_size:,}",
                f"{each.parameters:,}",
                f"{each.in_use:,}",
                *(f"{n / 1e6:,.1f}" for n in (spent.total, spent.mixer, spent.mlp, spent.logits)),
            )
        )
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    lines = [
        f"width {config.hidden_size:,}, {config.num_layers:,} layers, vocabulary "
        f"{config.vocab_size:,}",
        f"forward FLOPs of one sample of {config.context:,} tokens, two per multiply-add",
        "",
    ]
    for name, *numbers in rows:
        cells = [text.rjust(width) for text, width in zip(numbers, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *cells]))
    return "\n".join(lines)


def main(arguments: launch.Arguments) -> None:
    """The command."""
    config = launch.freeze(arguments.config, CountConfig)
    print(table(config, count(config)))


if __name__ == "__main__":
    launch.app(main, config="configs/protot/throughput.py", workdir_required=False)
