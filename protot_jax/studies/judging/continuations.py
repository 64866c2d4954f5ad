"""Continuations of the prompts by every model, greedy and sampled, kept as they are generated."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import pyarrow as pa

import lm_jax
from lm_jax.errors import UsageError
from lm_jax.evaluate.multiple_choice import likelihood
from lm_jax.model.sampling import Sampling
from lm_jax.run.rows import Unit
from lm_jax.run.units import measure_units
from lm_jax.study import Work
from protot_jax.studies.judging.prompts import continuation
from protot_jax.training.saved_run import TrainedModel

Decoding = Literal["greedy", "sampled"]
FOLDER = "continuations"
BATCH = 16
_SCHEMA = pa.schema(
    [("prompt", pa.int32()), ("text", pa.string()), ("tokens", pa.int32()), ("ended", pa.bool_())]
)


class Continuation(NamedTuple):
    """A generated text, the number of its tokens, and whether the model ended the document."""

    text: str
    tokens: int
    ended: bool


def prompt_ids(
    models: Mapping[str, TrainedModel], prompts: Sequence[str], new_tokens: int
) -> dict[str, list[list[int]]]:
    """The ids of each prompt by the tokenizer of each model.

    Raises:
      UsageError: prompt and continuation exceed the context of a model that has one.
    """
    result = {}
    for name, model in models.items():
        ids = [likelihood.encode(model.tokenizer, prompt) for prompt in prompts]
        longest = max(map(len, ids)) + new_tokens
        if longest > model.cfg.max_length and not model.mixer.recurrent:
            raise UsageError(
                f"--prompt_tokens and --new_tokens come to {longest} tokens, and the context of "
                f"{name} is {model.cfg.max_length}; give fewer"
            )
        result[name] = ids
    return result


def generate(
    models: Mapping[str, TrainedModel],
    prompts: Sequence[str],
    decodings: Mapping[Decoding, Sampling],
    work: Work,
    *,
    new_tokens: int,
    seed: int,
) -> dict[tuple[Decoding, str], list[Continuation]]:
    """The continuations by decoding and model, in the order of the prompts.

    Args:
      models: trained models by name.
      prompts: texts.
      decodings: the sampler of each.
      work: the open work folder, in which an earlier start's continuations are found; its
        fingerprint is of all that determines them.
      new_tokens: the most tokens to generate.
      seed: seed of the samplers; one prompt's tokens do not depend on other models or decodings.

    Raises:
      StoppedError: the command was asked to stop; what was generated is saved.
    """
    ids = prompt_ids(models, prompts, new_tokens)
    starts = range(0, len(prompts), BATCH)
    sets = [(decoding, name) for decoding in decodings for name in models]
    plan: dict[Unit, tuple[Decoding, str, int]] = {
        (*each, start): (*each, start) for each in sets for start in starts
    }

    def batch(unit: tuple[Decoding, str, int]) -> dict[str, Sequence[Any]]:
        decoding, name, start = unit
        texts = _batch(
            models[name],
            ids[name][start : start + BATCH],
            sampling=decodings[decoding],
            new_tokens=new_tokens,
            key=jax.random.fold_in(jax.random.key(seed), start),
        )
        columns = dict(zip(Continuation._fields, zip(*texts, strict=True), strict=True))
        return {"prompt": range(start, start + len(texts)), **columns}

    with work.store(_SCHEMA, shards=FOLDER) as store:
        measure_units(store, "generating", plan, batch, noun="batches")
        return {
            each: [
                Continuation(row["text"], row["tokens"], row["ended"])
                for start in starts
                for row in store.read_unit((*each, start)).to_pylist()
            ]
            for each in sets
        }


def _batch(
    model: TrainedModel,
    ids: Sequence[list[int]],
    *,
    sampling: Sampling,
    new_tokens: int,
    key: jax.Array,
) -> list[Continuation]:
    tokenizer = model.tokenizer
    # One size of batch, because each compiles another program.
    filled = [*ids, *[ids[0]] * (BATCH - len(ids))]
    rows = lm_jax.generate(
        model.params,
        filled,
        model.cfg,
        max_new_tokens=new_tokens,
        sampling=sampling,
        key=key,
        stop_id=tokenizer.stop_ids,
        mixer=model.mixer,
    )
    result = []
    for before, new in zip(ids, rows, strict=False):
        ended = new[-1] in tokenizer.stop_ids
        text = continuation(tokenizer, before, new[:-1] if ended else new)
        result.append(Continuation(text, len(new), ended))
    return result
