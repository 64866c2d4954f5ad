"""The numbers of a judging run: measures of the texts, controls of the judges, ratings.

No judge rates that fails a control: its numbers would be of what it mistakes (`verdicts.Control`).
"""

from collections.abc import Mapping, Sequence
import itertools
import math

import numpy as np
import pyarrow as pa

from lm_jax.evaluate import generation, ratings, verdicts
from lm_jax.evaluate.generation import Bleu
from lm_jax.evaluate.pairwise import AskedJudge
from lm_jax.evaluate.ratings import DisconnectedError
from lm_jax.run.results import finite
from lm_jax.statistics import Interval, clustered_bootstrap, wilson
from protot_jax.studies.judging import results
from protot_jax.studies.judging.continuations import Continuation, Decoding
from protot_jax.studies.judging.judges import Verdicts
from protot_jax.studies.judging.prompts import Prompts

Texts = Mapping[tuple[Decoding, str], Sequence[Continuation]]
Scores = Mapping[tuple[Decoding, str], Bleu]
Rouge = Mapping[tuple[Decoding, str], Sequence[float]]
REFERENCE = "reference"
# Takes the place of no ridge where a model won, or lost, all games of a resample.
RIDGE = 0.05
ROWS = pa.schema(
    [
        ("decoding", pa.string()),
        ("model", pa.string()),
        ("prompt", pa.int32()),
        ("prompt_text", pa.string()),
        ("reference", pa.string()),
        ("text", pa.string()),
        ("tokens", pa.int32()),
        ("ended", pa.bool_()),
        ("words", pa.int32()),
        ("bleu", pa.float64()),
        ("bleu_unsmoothed", pa.float64()),
        ("rouge_l", pa.float64()),
        ("repetition", pa.float64()),
    ]
)


def scored(prompts: Prompts, texts: Texts) -> dict[tuple[Decoding, str], Bleu]:
    """BLEU of every set of continuations against the references."""
    return {
        key: generation.bleu([one.text for one in each], prompts.references)
        for key, each in texts.items()
    }


def rouge_scored(prompts: Prompts, texts: Texts) -> dict[tuple[Decoding, str], tuple[float, ...]]:
    """ROUGE-L of every continuation against its reference."""
    return {
        key: generation.rouge_l([one.text for one in each], prompts.references)
        for key, each in texts.items()
    }


def rows(prompts: Prompts, texts: Texts, bleu: Scores, rouge: Rouge) -> pa.Table:
    """One row for each continuation; a repetition that is undefined is null."""
    listed = [
        {
            "decoding": decoding,
            "model": model,
            "prompt": number,
            "prompt_text": prompts.prompts[number],
            "reference": prompts.references[number],
            **one._asdict(),
            "words": len(one.text.split()),
            "bleu": bleu[decoding, model].sentences[number],
            "bleu_unsmoothed": bleu[decoding, model].unsmoothed[number],
            "rouge_l": rouge[decoding, model][number],
            "repetition": finite(generation.repetition(one.text)),
        }
        for (decoding, model), each in texts.items()
        for number, one in enumerate(each)
    ]
    return pa.Table.from_pylist(listed, schema=ROWS)


def summarise(
    settings: results.Settings,
    models: Sequence[results.Model],
    prompts: Prompts,
    texts: Texts,
    bleu: Scores,
    rouge: Rouge,
    said: Sequence[Verdicts],
) -> results.JudgingSummary:
    """All numbers of `summary.json`."""
    any_bleu = next(iter(bleu.values()))
    measured = [
        _measured(
            settings,
            model,
            decoding,
            [one.text for one in each],
            each,
            bleu[decoding, model],
            rouge[decoding, model],
        )
        for (decoding, model), each in texts.items()
    ]
    measured.append(_measured(settings, REFERENCE, None, prompts.references))
    return results.JudgingSummary(
        results.SCHEMA,
        results.VERSION,
        settings,
        tuple(models),
        any_bleu.signature,
        any_bleu.unsmoothed_signature,
        tuple(measured),
        tuple(_sample(prompts, texts, bleu, rouge, *key) for key in texts),
        tuple(_judged(settings, texts, each) for each in said),
    )


def _measured(
    settings: results.Settings,
    model: str,
    decoding: Decoding | None,
    texts: Sequence[str],
    continued: Sequence[Continuation] = (),
    bleu: Bleu | None = None,
    rouge: Sequence[float] = (),
) -> results.Measured:
    def mean(values: Sequence[float], most: float = 1.0) -> Interval | None:
        kept = [value for value in values if math.isfinite(value)]
        if len(kept) < 2:
            return None
        return clustered_bootstrap(
            kept,
            np.arange(len(kept)),
            resamples=settings.resamples,
            within=(0.0, most),
            seed=settings.seed,
        )

    words = mean([len(text.split()) for text in texts], math.inf)
    assert words is not None
    return results.Measured(
        model,
        decoding,
        mean(bleu.sentences) if bleu else None,
        mean(bleu.unsmoothed) if bleu else None,
        bleu.corpus if bleu else None,
        mean([generation.repetition(text) for text in texts]),
        tuple(finite(generation.distinct(texts, n)) for n in generation.ORDERS),
        words,
        wilson(sum(one.ended for one in continued), len(continued)) if continued else None,
        mean(rouge),
    )


def _sample(
    prompts: Prompts,
    texts: Texts,
    bleu: Scores,
    rouge: Rouge,
    decoding: Decoding,
    model: str,
) -> results.Sample:
    """The prompt at which a model's BLEU is highest (appendix B.3)."""
    number = int(np.argmax(bleu[decoding, model].sentences))
    answers = tuple(
        results.Answer(
            other,
            texts[decoding, other][number].text,
            bleu[decoding, other].sentences[number],
            bleu[decoding, other].unsmoothed[number],
            rouge[decoding, other][number],
        )
        for kind, other in texts
        if kind == decoding
    )
    prompt, reference = prompts.prompts[number], prompts.references[number]
    return results.Sample(model, decoding, number, prompt, reference, answers)


def _judged(settings: results.Settings, texts: Texts, said: Verdicts) -> results.JudgeResult:
    controls = tuple(verdicts.control(kind, scores) for kind, scores in said.controls.items())
    # Both verdicts are on the same pair: the first names the left one in order 0, not in order 1.
    itself = said.controls["itself"]
    named = np.stack([itself[:, 0] == 1, itself[:, 1] == 0], 1)[np.isin(itself, (0, 1))]
    failed = verdicts.failed(controls)
    return results.JudgeResult(
        said.judge.name,
        said.judge.unreadable if isinstance(said.judge, AskedJudge) else 0,
        controls,
        not failed,
        wilson(int(named.sum()), named.size) if named.size else None,
        tuple(
            _decoding(settings, texts, decoding, scores, failed)
            for decoding, scores in said.models.items()
        ),
    )


def _decoding(
    settings: results.Settings,
    texts: Texts,
    decoding: Decoding,
    score_QC2: np.ndarray,
    failed: Sequence[str],
) -> results.Judged:
    names = [model for kind, model in texts if kind == decoding]
    pairs = list(itertools.combinations(range(len(names)), 2))
    length_QP = np.array(
        [[len(one.text.split()) for one in texts[decoding, name]] for name in names]
    ).T
    if not pairs:
        nothing = verdicts.consistency(score_QC2, [(0, 0)], length_QP)
        return results.Judged(decoding, nothing, (), None, 0.0, None, "one model has no opponent")
    found = verdicts.consistency(score_QC2, pairs, length_QP)
    duels = tuple(
        _duel(names[left], names[right], score_QC2[:, c]) for c, (left, right) in enumerate(pairs)
    )
    why = why_not(failed)
    if not failed and not found.pairs:
        why = "it gave no verdicts"
    if why:
        return results.Judged(decoding, found, duels, None, 0.0, None, why)
    rated, ridge, weight = _ratings(settings, names, pairs, score_QC2, length_QP)
    return results.Judged(decoding, found, duels, rated, ridge, weight, "")


def why_not(failed: Sequence[str]) -> str:
    """Why a judge that failed these controls may not rate; empty without any."""
    if not failed:
        return ""
    return f"the judge failed the control{'s' * (len(failed) > 1)} {', '.join(failed)}"


def _duel(left: str, right: str, score_Q2: np.ndarray) -> results.Duel:
    mean_Q = score_Q2[score_Q2[:, 0] == score_Q2[:, 1]].mean(-1)
    won, tied, lost = (int((score_Q2 == value).sum()) for value in (1, 0.5, 0))
    agreed = {"agreed_won": int((mean_Q == 1).sum()), "agreed_lost": int((mean_Q == 0).sum())}
    return results.Duel(left, right, won, tied, lost, **agreed)


def _ratings(
    settings: results.Settings,
    names: Sequence[str],
    pairs: Sequence[tuple[int, int]],
    score_QC2: np.ndarray,
    length_QP: np.ndarray,
) -> tuple[tuple[results.Rating, ...], float, float]:
    """Ratings of every model, the ridge that they needed, and the weight of length."""
    options = {"resamples": settings.resamples, "seed": settings.seed}
    each, agreed = (
        verdicts.wins(score_QC2, pairs, len(names), rule) for rule in ("each", "agreed")
    )
    ridge = 0.0
    try:
        strengths = [ratings.bootstrap(wins, **options) for wins in (each, agreed)]
    except DisconnectedError:
        ridge = RIDGE
        strengths = [ratings.bootstrap(wins, ridge=ridge, **options) for wins in (each, agreed)]
    played = verdicts.games(score_QC2, pairs, length_QP)
    elo = ratings.elo(*played[:3], len(names), seed=settings.seed)
    at_length, weight = ratings.length_controlled(*played, len(names))
    rated = tuple(
        results.Rating(name, _points(strength), _points(both), online, _point(float(at)))
        for name, strength, both, online, at in zip(names, *strengths, elo, at_length, strict=True)
    )
    return rated, ridge, weight


def _points(strength: Interval) -> Interval:
    estimate, low, high = map(_point, (strength.estimate, strength.low, strength.high))
    return Interval(estimate, low, high, strength.n)


def _point(strength: float) -> float:
    return ratings.START + ratings.POINTS * strength
