"""Continues a text with a trained model, token by token.

    python -m protot_jax.generate --run=runs/speeches --prompt="the people of the united states"

ProtoT, Mamba and DeltaNet need memory that does not grow; with `--tokens=0` they continue until
Ctrl-C. LLaMA keeps every position, and ends at the context that it was trained on. The paper does
not say how its samples were drawn: the temperature, top-k and top-p here are ours, and
`--temperature=0` is greedy.

`--edit=L2P5` (once for each) continues the text with prototype 5 of layer 2 closed, as
`protot_jax.interventions` does; with the same `--draw_seed`, what differs is the prototype's doing.
"""

from collections.abc import Iterator, Mapping
import itertools
import sys
from typing import Any

from absl import flags
import jax
from tokenizers.decoders import DecodeStream

from lm_jax.model.decode import Sampling, stream
from lm_jax.run import cli, stop
from protot_jax import edits, run_flags
from protot_jax.saved_run import TrainedModel

_PROMPT = flags.DEFINE_string("prompt", "", "text to continue; empty begins a document")
_TOKENS = flags.DEFINE_integer("tokens", 100, "how many to add; 0 for no end", lower_bound=0)
_TEMPERATURE = flags.DEFINE_float("temperature", 0.8, "0 is greedy", lower_bound=0.0)
_TOP_K = flags.DEFINE_integer("top_k", 40, "keep the k most probable tokens; 0 for all")
_TOP_P = flags.DEFINE_float("top_p", 0.95, "keep the tokens that make up this mass")
_EDIT = flags.DEFINE_multi_string(
    "edit", [], f"a prototype to disturb, L2P5 or L2P5:MODE; {', '.join(edits.MODES)}"
)
# Flags of all commands share one table, and `polyattn_jax.check` has a `seed`.
_SEED = flags.DEFINE_integer("draw_seed", 0, "of the sampling", lower_bound=0)
flags.adopt_module_key_flags(run_flags)


def text(
    model: TrainedModel,
    prompt: str,
    *,
    sampling: Sampling,
    key: jax.Array,
    edits: Mapping[str, Any] | None = None,
) -> Iterator[str]:
    """The continuation of `prompt`, piece by piece, ending where the model ends the document.

    A model of attention also ends at its longest context. `edits` are those of `lm_jax.generate`.

    Raises:
      BadInputError: the prompt fills that context.
    """
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt, split_special_tokens=True)
    # The template closes a document; a prompt is to go on.
    while len(ids) > 1 and ids[-1] == tokenizer.eos_id:
        ids.pop()
    pieces = DecodeStream(skip_special_tokens=True)
    # What follows a word depends on the word: the first piece of a new one begins with a space.
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
    del arguments
    sampling = Sampling(_TEMPERATURE.value, _TOP_K.value, _TOP_P.value)
    chosen = [edits.parse(given) for given in _EDIT.value]
    model = run_flags.load()
    if chosen:
        # A model without prototypes is refused.
        _ = model.prototypes
    pieces = text(
        model,
        _PROMPT.value,
        sampling=sampling,
        key=jax.random.key(_SEED.value),
        edits=edits.several(model.params, chosen) if chosen else None,
    )
    sys.stdout.write(_PROMPT.value)
    for piece in itertools.islice(pieces, _TOKENS.value or None):
        sys.stdout.write(piece)
        sys.stdout.flush()
        if stop.requested():
            break
    sys.stdout.write("\n")


if __name__ == "__main__":
    cli.app(main, workdir_required=False)
