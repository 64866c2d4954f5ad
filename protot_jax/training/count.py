"""Table of parameters and forward FLOPs of the models of a config.

    iaj protot count
    iaj protot count --config=protot/throughput --config.hidden_size=512 --config.num_layers=12

`lm_jax.model.flops` documents what is counted; attention is counted over all T x T pairs, although
causality masks half of them.

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
    with gates + 2 * (D N H + D N)        output gate, step sizes
             + N H^2                      state: decay

    slots      2 * (4 D N H + D N M)      queries, keys, values, output; decays of slots
             + 2 * 5 N M H                keys and values: decay, write, add; read
    Raven    + 2 D N                      step sizes

and 2 * D V for the logits. Letters are those of the mixers' parameters.
"""

from collections.abc import Sequence
import dataclasses

from lm_jax.console import cli
from lm_jax.console.terminal import format_table
from lm_jax.errors import UsageError, nearest
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import count_params
from lm_jax.model.flops import Flops, forward_flops
from lm_jax.run.config import from_plain
from protot_jax.mixers.models import MODELS, build_model
from protot_jax.mixers.prototypes import PrototypeMixer


@dataclasses.dataclass(frozen=True)
class CountConfig:
    """The models to count, and their common shape.

    Attributes:
      hidden_size: width of every model.
      num_layers: number of blocks of every model.
      vocab_size: number of tokens of the vocabulary.
      context: tokens of one sample, over which FLOPs are counted.
      models: kinds of model to count, such as protot, llama or mamba
        (`protot_jax.mixers.models.MODELS`).
      tied: names of the models whose output projection is the token embedding.
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
class Count:
    """A model's parameters, the number in use (that an output depends on), and its FLOPs."""

    name: str
    cfg: DecoderConfig
    parameters: int
    in_use: int
    flops: Flops


def count(config: CountConfig) -> list[Count]:
    """Counts parameters and FLOPs of every model of the config."""
    counts = []
    for name in config.models:
        cfg, mixer = build_model(
            name,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            vocab_size=config.vocab_size,
            context=config.context,
            tie_embeddings=name in config.tied,
        )
        parameters = count_params(cfg, mixer=mixer)
        unused = mixer.unused(cfg) if isinstance(mixer, PrototypeMixer) else 0
        result = forward_flops(cfg, mixer, config.context)
        counts.append(Count(name, cfg, parameters, parameters - unused, result))
    return counts


COLUMNS = (
    *("model", "tied", "MLP size", "parameters", "in use"),
    *("MFLOPs", "of mixers", "of MLPs", "of logits"),
)


def table(config: CountConfig, counts: Sequence[Count]) -> str:
    """The counts as lines of text, one model each."""
    rows: list[tuple[str, ...]] = []
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
    lines = [
        f"width {config.hidden_size:,}, {config.num_layers:,} layers, vocabulary "
        f"{config.vocab_size:,}",
        f"forward FLOPs of one sample of {config.context:,} tokens, two per multiply-add",
        "",
        format_table(COLUMNS, rows),
    ]
    return "\n".join(lines)


def main(arguments: cli.Arguments) -> None:
    """The command."""
    config = from_plain(arguments.config, CountConfig)
    print(table(config, count(config)))


if __name__ == "__main__":
    cli.app(main, config="protot/throughput", config_class=CountConfig, workdir_required=False)
