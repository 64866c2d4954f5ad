"""Generates text with a trained model, token by token.

    iaj protot generate --run=runs/speeches --prompt="the people of the united states"
    iaj protot generate --run=runs/speeches --prompt="the war" --tokens=0 --edit=L2P5

ProtoT, Mamba and DeltaNet need constant memory; with `--tokens=0` they generate until Ctrl-C. LLaMA
caches every position, and ends at its training context. The paper does not say how it sampled;
the defaults of temperature, top-k and top-p are those of the released code, which also has
`--repetition_penalty=1.05 --no_repeat_ngram=4`. `--temperature=0` is greedy.

`--edit=L2P5` (repeatable) generates with the write gate of prototype 5 in layer 2 zeroed, as
`protot_jax.interventions` does; with the same `--seed`, any difference is an effect of the edit.
"""

from collections.abc import Iterator, Mapping
import dataclasses
import itertools
import sys
from typing import Any

import jax
from tokenizers.decoders import DecodeStream

from lm_jax.model.decode import Sampling, stream
from lm_jax.run import cli, stop
from lm_jax.run.options import option
from protot_jax import edits
from protot_jax.run_options import RunOptions
from protot_jax.saved_run import TrainedModel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(RunOptions):
    """The prompt, the sampler, and the edits of prototypes."""

    prompt: str = option("", "text to continue; empty begins a document")
    tokens: int = option(100, "number of tokens to generate; 0 for no end", least=0)
    temperature: float = option(0.8, "temperature of the sampler; 0 is greedy", least=0.0)
    top_k: int = option(40, "sample from the k most probable tokens; 0 for all")
    top_p: float = option(0.95, "sample from the most probable tokens of this total probability")
    repetition_penalty: float = option(
        1.0, "divide positive logits of tokens that occurred by this, multiply negative; 1 for none"
    )
    no_repeat_ngram: int = option(
        0, "exclude tokens that complete an n-gram of this length a second time; 0 for none"
    )
    seed: int = option(0, "random seed of the sampler", least=0)
    edit: tuple[str, ...] = option(
        (),
        f"edit of a prototype, L2P5 or L2P5:MODE with a MODE of {', '.join(edits.MODES)}",
        repeated=True,
    )


def text(
    model: TrainedModel,
    prompt: str,
    *,
    sampling: Sampling,
    key: jax.Array,
    edits: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """Yields the continuation of `prompt` piece by piece, until the model ends the document.

    An attention model also stops at its longest context. `edits` are those of `lm_jax.generate`.

    Raises:
      BadInputError: the prompt fills that context.
    """
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt, split_special_tokens=True)
    # The tokenizer ends a document; a prompt is continued.
    while len(ids) > 1 and ids[-1] == tokenizer.eos_id:
        ids.pop()
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
        stop_id=tokenizer.eos_id,
        edits=edits,
    )
    for token in tokens:
        if piece := pieces.step(tokenizer.backend, token):
            yield piece


def main(arguments: cli.Arguments) -> None:
    """The command."""
    options: Options = arguments.options
    sampling = Sampling(
        options.temperature,
        options.top_k,
        options.top_p,
        options.repetition_penalty,
        options.no_repeat_ngram,
    )
    chosen = [edits.parse(spec) for spec in options.edit]
    model = options.load()
    if chosen:
        # A model without prototypes is refused.
        _ = model.prototypes
    pieces = text(
        model,
        options.prompt,
        sampling=sampling,
        key=jax.random.key(options.seed),
        edits=edits.several(model.params, chosen) if chosen else None,
    )
    sys.stdout.write(options.prompt)
    for piece in itertools.islice(pieces, options.tokens or None):
        sys.stdout.write(piece)
        sys.stdout.flush()
        if stop.requested():
            break
    sys.stdout.write("\n")


if __name__ == "__main__":
    cli.app(main, options=Options, workdir_required=False)
