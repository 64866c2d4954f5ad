"""Judges over continuations: the language models they run, their verdicts, and their controls."""

from collections.abc import Collection, Iterator, Mapping, Sequence
import contextlib
from functools import partial
import itertools
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
import pyarrow as pa

import lm_jax
from lm_jax.assets import published
from lm_jax.errors import UsageError
from lm_jax.evaluate import pairwise, verdicts
from lm_jax.evaluate.multiple_choice import Scorer, open_cache
from lm_jax.evaluate.pairwise import PairJudge, Shown
from lm_jax.model.decoder import last_change
from lm_jax.model.mixers import ATTENTION
from lm_jax.model.precision import exact_jit
from lm_jax.run import stop
from lm_jax.run.finished import file_inputs
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.weights.load import is_there, load_pretrained, open_pretrained
from protot_jax.studies.judging.continuations import Decoding
from protot_jax.studies.judging.prompts import Prompts
from protot_jax.training.saved_run import DATA, TrainedModel, load_run, run_names

ANSWERS = "answers.jsonl"
SCORES = "scores"
CONTROL = "control"
ROWS = pa.schema(
    [
        ("judge", pa.string()),
        ("decoding", pa.string()),
        ("prompt", pa.int32()),
        ("left", pa.string()),
        ("right", pa.string()),
        ("left_first", pa.bool_()),
        ("verdict", pa.string()),
    ]
)


class Verdicts(NamedTuple):
    """What one judge said.

    Attributes:
      judge: name of the judge and count of its unreadable answers.
      models: scores of the left model by decoding, [Q, C, 2] (`lm_jax.evaluate.verdicts`).
      controls: scores of the real continuation by kind, [Q, 2].
      rows: one for each verdict, as `ROWS`.
    """

    judge: PairJudge
    models: dict[Decoding, np.ndarray]
    controls: dict[str, np.ndarray]
    rows: list[tuple]


def is_run(place: str | Path) -> bool:
    """Whether a folder is the work folder of a pretraining run."""
    folder = published.resolve(place)
    return (folder / CONFIG_FILE).is_file() and (folder / DATA).is_dir()


def inputs(name: str) -> dict[str, str]:
    """What a judge reads: a language model with its chat template, a file of answers, or nothing.

    Raises:
      UsageError: the judge is unknown.
    """
    kind, _, place = pairwise.check(name)
    of_judge = f"judge {name}"
    if kind == "cached":
        return file_inputs({of_judge: published.resolve_file(place)})
    # What was made with one that is gone can still be shown.
    if kind not in ("tokens", "perplexity") or not is_there(place):
        return {}
    model = load_run(place) if is_run(place) else open_pretrained(place)
    return {of_judge: model.identity.chat_text}


@contextlib.contextmanager
def opened(
    names: Sequence[str], folder: Path, judged: Collection[str]
) -> Iterator[list[PairJudge]]:
    """The judges of those names; a language model keeps its scores in the work folder.

    Args:
      names: names of the judges.
      folder: an open work folder.
      judged: sha256 of the checkpoints that are judged.

    Raises:
      UsageError: one of these is a judge.
      As `lm_jax.evaluate.pairwise.build`.
    """
    with contextlib.ExitStack() as stack:
        scorer = partial(_scorer, stack, folder / SCORES, judged)
        yield [pairwise.build(name, scorer=scorer, answers=folder / ANSWERS) for name in names]


def _scorer(
    stack: contextlib.ExitStack, folder: Path, judged: Collection[str], place: str
) -> tuple[str, Scorer]:
    """A trained run or a pretrained model, and a name of it."""
    model = load_run(place) if is_run(place) else load_pretrained(place)
    mixer = model.mixer if isinstance(model, TrainedModel) else ATTENTION
    own = model.checkpoint_sha256 if isinstance(model, TrainedModel) else model.sha256
    if own in judged:
        raise UsageError(
            f"the judge {place} is one of the models that are judged, and would prefer itself; "
            "name another model"
        )
    if model.tokenizer is None:
        raise UsageError(f"{place} holds no tokenizer; put its tokenizer.json there")
    params, run = model.params, exact_jit(partial(lm_jax.forward, cfg=model.cfg, mixer=mixer))

    def logits(tokens_BT: np.ndarray, valid_BT: np.ndarray) -> jax.Array:
        stop.check("while judging")
        # Without rotations by length, no causal model needs to know what is padding.
        counted = last_change(model.cfg, tokens_BT.shape[1])
        return run(params, tokens_BT, valid_BT=valid_BT if counted else None).logits

    cache = stack.enter_context(
        open_cache(folder, model=model.identity.text, settings={"dtype": "float32"})
    )
    name = Path(place).name
    if isinstance(model, TrainedModel):
        name = f"{run_names([Path(place)], [model])[0]}, seed {model.seed}"
    name += f" ({model.identity.digest[:12]})"
    return name, Scorer(logits, model.tokenizer, model.cfg.max_length, cache=cache)


def judge(
    judged: PairJudge,
    prompts: Prompts,
    texts: Mapping[Decoding, Mapping[str, Sequence[str]]],
    *,
    seed: int,
) -> Verdicts:
    """The verdicts of a judge on controls, and on every pair of models in both orders.

    Args:
      judged: the judge.
      prompts: prompts with their true continuations.
      texts: continuations by decoding, then by model.
      seed: seed of the controls.

    Raises:
      StoppedError: the command was asked to stop; answers and scores are saved.
    """
    result = Verdicts(judged, {}, {}, [])
    made = verdicts.controls(prompts.prompts, prompts.references, seed=seed)
    for kind, shown in made.items():
        (result.controls[kind],) = _ask(result, CONTROL, [("real", kind, shown)])
    for decoding, by_model in texts.items():
        duels = []
        for left, right in itertools.combinations(by_model, 2):
            three = zip(prompts.prompts, by_model[left], by_model[right], strict=True)
            duels.append((left, right, [Shown(*each) for each in three]))
        # [C, Q, 2] -> [Q, C, 2]; one model alone has no pair.
        scores = _ask(result, decoding, duels)
        shape = (len(prompts.prompts), 0, 2)
        result.models[decoding] = np.stack(scores, 1) if scores else np.zeros(shape)
    return result


def _ask(
    result: Verdicts, decoding: str, duels: Sequence[tuple[str, str, list[Shown]]]
) -> list[np.ndarray]:
    """Scores [Q, 2] of each duel; its verdicts are added to the rows."""
    scores = []
    for left, right, shown in duels:
        stop.check("while judging")
        both = pairwise.both_orders(result.judge, shown)
        scores.append(np.array([verdicts.score(each) for each in both]))
        result.rows.extend(
            (result.judge.name, decoding, prompt, left, right, order == 0, verdict)
            for prompt, pair in enumerate(both)
            for order, verdict in enumerate(pair)
        )
    return scores


def table(said: Sequence[Verdicts]) -> pa.Table:
    """The verdicts of all judges as rows."""
    rows = [row for each in said for row in each.rows]
    columns = zip(*rows, strict=True) if rows else [[] for _ in ROWS]
    return pa.table(dict(zip(ROWS.names, map(list, columns), strict=True)), schema=ROWS)
