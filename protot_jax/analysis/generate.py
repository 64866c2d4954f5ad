"""Generates text with a trained model, token by token.

    iaj protot generate --run=runs/speeches --prompt="the people of the united states"
    iaj protot generate --run=runs/speeches --prompt="the war" --tokens=0 --edit=L2P5
    iaj protot generate --run=runs/speeches --prompt="the war" --edit=L2P5:scale --strengths=0,1,4

ProtoT, Mamba and DeltaNet need constant memory; with `--tokens=0` they generate until Ctrl-C. LLaMA
caches every position, and ends at its training context. The paper does not say how it sampled;
the defaults of temperature, top-k and top-p are those of the released code, which also has
`--repetition_penalty=1.05 --no_repeat_ngram=4`. `--temperature=0` is greedy.

`--edit=L2P5` (repeatable) generates with the write gate of prototype 5 in layer 2 zeroed, as
`protot_jax.studies.interventions` does; with the same `--seed`, any difference is an effect of the
edit. `--edit=L2P5:scale=3` triples what is read from it, and `--edit=L2P5:scale
--strengths=0,1,2,4` continues each prompt (`--prompt` is repeatable) once for each factor, with the
probability of `--target` after the prompt. Other prototypes of the layer get the same factors
(`--controls`), and a table shows where the named one lies among them: a factor that is large enough
moves any text. `--routing_of=TEXT` gives the first tokens the gates of another text, token by
token.
"""

from collections.abc import Iterator, Mapping, Sequence
import dataclasses
import functools
import itertools
import sys
from typing import Annotated, Any

import jax
import numpy as np
from tokenizers.decoders import DecodeStream

from lm_jax.console import cli, terminal
from lm_jax.errors import UsageError
from lm_jax.model.decode import stream
from lm_jax.model.sampling import Sampling
from lm_jax.report.markup import number
from lm_jax.run import stop
from lm_jax.run.settings import Flag, at_least
from protot_jax.analysis.steering import (
    EditsAt,
    Place,
    Steered,
    others,
    parse_strengths,
    place,
    routing_of,
    sweep,
)
from protot_jax.analysis.token_ids import open_ids
from protot_jax.mixers import edits
from protot_jax.mixers.edits import PrototypeEdit
from protot_jax.training.run_options import RunOptions
from protot_jax.training.saved_run import TrainedModel

# A p below it is taken for a finding elsewhere (`interventions.summary.LEVEL`).
_LEVEL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The prompt, the sampler, and the edits of prototypes.

    Attributes:
      prompt: text to continue; empty begins a document.
      tokens: number of tokens to generate; 0 for no end.
      temperature: temperature of the sampler; 0 is greedy.
      top_k: number of most probable tokens to sample from; 0 for all.
      top_p: total probability of the most probable tokens to sample from.
      repetition_penalty: number by which positive logits of tokens that occurred are divided and
        negative ones multiplied; 1 for none.
      no_repeat_ngram: length of n-grams that may not occur a second time; 0 for none.
      seed: random seed of the sampler.
      edit: edit of a prototype, L2P5 or L2P5:MODE with a MODE of mask_write, mask_read, zero_write,
        zero_read, or scale=FACTOR; also as layer=2,prototype=5,mode=scale,by=0.
      strengths: factors, each in turn, of the edits of mode scale that name none.
      controls: number of other prototypes of the layer that get the same strengths, drawn.
      target: word whose probability after the prompt is printed for every strength.
      routing_of: text whose routing the first tokens take, token by token; default their own.
    """

    prompt: Annotated[tuple[str, ...], Flag(repeated=True)] = ("",)
    tokens: Annotated[int, at_least(0)] = 100
    temperature: Annotated[float, at_least(0.0)] = 0.8
    top_k: int = 40
    top_p: float = 0.95
    repetition_penalty: float = 1.0
    no_repeat_ngram: int = 0
    seed: Annotated[int, at_least(0)] = 0
    edit: Annotated[tuple[str, ...], Flag(repeated=True)] = ()
    strengths: tuple[str, ...] = ()
    controls: Annotated[int, at_least(1)] = 15
    target: str | None = None
    routing_of: str | None = None

    @property
    def sampling(self) -> Sampling:
        """The sampler.

        Raises:
          UsageError: a setting out of range.
        """
        names = [field.name for field in dataclasses.fields(Sampling)]
        return Sampling(**{name: getattr(self, name) for name in names})


def text(
    model: TrainedModel,
    prompt: str,
    *,
    sampling: Sampling,
    key: jax.Array,
    edits: Mapping[str, Any] | EditsAt | None = None,
) -> Iterator[str]:
    """Yields the continuation of `prompt` piece by piece, until the model ends the document.

    An attention model also stops at its longest context. `edits` are those of `lm_jax.generate`, or
    those of some positions (`protot_jax.analysis.steering`).

    Raises:
      BadInputError: the prompt fills that context.
    """
    tokenizer = model.tokenizer
    ids = open_ids(tokenizer, prompt)
    pieces = DecodeStream(skip_special_tokens=True)
    # The text of a token depends on those before: a new word begins with a space.
    for token in ids:
        pieces.step(tokenizer.backend, token)
    tokens = stream(
        model.params,
        ids,
        model.cfg,
        mixer=model.mixer,
        sampling=sampling,
        key=key,
        stop_id=tokenizer.stop_ids,
        edits=edits,
    )
    for token in tokens:
        if piece := pieces.step(tokenizer.backend, token):
            yield piece


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    sampling, key = options.sampling, jax.random.key(options.seed)
    chosen = [edits.parse(spec) for spec in options.edit]
    strengths = parse_strengths(options.strengths)
    if options.target is not None and not strengths:
        raise UsageError("target: its probability is that of a sweep; give --strengths=0,1,2 too")
    if options.routing_of is not None and strengths:
        raise UsageError("routing_of and strengths cannot be combined; leave one of them out")
    model = options.load()
    if chosen or strengths or options.routing_of is not None:
        # A model without prototypes is refused.
        _ = model.prototypes
    if strengths:
        run_sweeps(model, options, chosen, strengths)
        return
    changes: Mapping[str, Any] | EditsAt | None
    if options.routing_of is not None:
        changes = routing_of(model, options.routing_of, chosen)
    else:
        changes = edits.several(model.params, chosen) if chosen else None
    for prompt in options.prompt:
        pieces = text(model, prompt, sampling=sampling, key=key, edits=changes)
        sys.stdout.write(prompt)
        for piece in itertools.islice(pieces, options.tokens or None):
            sys.stdout.write(piece)
            sys.stdout.flush()
            if stop.requested():
                break
        sys.stdout.write("\n")
        if stop.requested():
            return


def run_sweeps(
    model: TrainedModel,
    options: Options,
    chosen: Sequence[PrototypeEdit],
    strengths: Sequence[float],
) -> None:
    """Sweeps the strengths over every prompt, of the named prototype and then of others.

    Raises:
      UsageError: as `steering.sweep` and `steering.others`.
    """
    one_sweep = functools.partial(
        sweep,
        model,
        strengths=strengths,
        target=options.target,
        tokens=options.tokens,
        sampling=options.sampling,
        key=jax.random.key(options.seed),
    )
    named = []
    for prompt in options.prompt:
        done = []
        for one in one_sweep(prompt, chosen):
            print(f"times {one.by:g}:\n{one.text}\n", flush=True)
            done.append(one)
        print(f"{format_sweep(done)}\n", flush=True)
        named.append(done)
    controls = []
    for other in others(model, chosen, count=options.controls, seed=options.seed):
        if stop.requested():
            break
        controls.append([list(one_sweep(prompt, other)) for prompt in options.prompt])
    if stop.requested():
        print("Stopped before the other prototypes were measured: this is no finding.")
        return
    print(format_places(place(named, controls)))


def format_places(places: Sequence[Place]) -> str:
    """Where the named prototype lies among others, for a terminal."""
    if not places:
        return "Nothing was generated that could be compared with other prototypes."
    units = {
        "probability": (".4%", "probability of the target"),
        "perplexity": (".1f", "perplexity without edits"),
    }
    heads = ["factor", "measure", "named", "others, median", "range", "equal or lower", "p"]
    rows = []
    for one in places:
        spec, words = units[one.measure]
        middle, low, high = (
            format(float(value), spec)
            for value in (np.median(one.others), min(one.others), max(one.others))
        )
        named = format(one.named, spec)
        equal = f"{one.as_low} of {len(one.others)}"
        rows.append(
            [f"{one.by:g}", words, named, middle, f"{low} to {high}", equal, f"{one.p:.2g}"]
        )
    prompts = places[0].prompts
    note = (
        "One prompt is an example and no finding; give more by --prompt."
        if prompts == 1
        else f"Geometric means over {prompts} prompts; p is of the rank among other prototypes of "
        "the layer, two-sided."
    )
    note += " p is not corrected for the number of factors and measures."
    least = min(1.0, 2 / (1 + max(len(one.others) for one in places)))
    note += f" None could be below {_LEVEL:g}: with so few" if least > _LEVEL else " With so many"
    note += f" prototypes, the smallest p is at least {least:.2g}."
    return f"{terminal.format_table(heads, rows, left=(1,))}\n\n{note}"


def format_sweep(swept: Sequence[Steered]) -> str:
    """What was measured under every factor, for a terminal."""
    heads = ["factor", "probability of the target", "perplexity without edits", "repetition"]
    rows = [
        [
            f"{one.by:g}",
            number(one.probability, ".4%"),
            number(one.perplexity, ".1f"),
            number(one.repetition, ".2f"),
        ]
        for one in swept
    ]
    return terminal.format_table(heads, rows, left=())


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)
