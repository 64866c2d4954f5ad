"""Computes the numbers of a concept report (`results.ConceptReport`) from collected gates.

The gates of one layer at a time are in memory (`collect.gates_of_layer`); only its statistics and
the gates of the top texts are kept.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import os

import numpy as np
from scipy import special

from lm_jax.evaluate.answers import about
from lm_jax.evaluate.judge import Judge, NullJudge
from lm_jax.run import progress, stop
from lm_jax.run.results import finite
from protot_jax.studies.concepts import (
    ablations,
    lag,
    locality,
    measures,
    ranking,
    resampling,
    results,
    units,
)
from protot_jax.studies.concepts.collect import GATES, Texts, gates_of_layer
from protot_jax.studies.concepts.examples import ReportTexts, spelled_tokens
from protot_jax.studies.concepts.results import (
    ConceptReport,
    Layer,
    Prototype,
    PrototypeGate,
    RandomTexts,
    Settings,
    TopText,
)
from protot_jax.studies.concepts.settings import ConceptConfig
from protot_jax.training.saved_run import TrainedModel

# Number of sets of random texts that are given to a judge for comparison.
BASELINE_DRAWS = 10


def summarise(
    model: TrainedModel,
    texts: Texts,
    activations: str | os.PathLike[str],
    settings: ConceptConfig,
    judge: Judge,
    compared: Sequence[units.Compared] = (),
) -> ConceptReport:
    """Computes all statistics of a concept report and picks its top texts.

    Args:
      model: the model of the gates.
      texts: the analysed texts, from `collect`.
      activations: the parquet file that `collect` wrote.
      settings: settings of the analysis.
      judge: names themes; a null judge is given no random texts either.
      compared: other units on the same texts.

    Raises:
      UsageError: the model has no prototypes.
      StoppedError: the command was asked to stop.
    """
    mixer, N = model.prototypes, len(texts.document_N)
    rng = np.random.default_rng(settings.seed)
    draws = 0 if isinstance(judge, NullJudge) else BASELINE_DRAWS
    drawn = rng.integers([model.cfg.num_layers, mixer.num_prototypes], size=(draws, 2))
    report_texts = ReportTexts(model.tokenizer, texts)
    counts_SN = resampling.bootstrap_counts(N, settings.resamples, settings.seed)
    half_SN = resampling.half_samples(N, settings.resamples, settings.seed)

    layers: list[Layer] = []
    prototypes: list[Prototype] = []
    baseline: list[RandomTexts] = []
    lags, repetitions = [], []
    with progress.track("analyse", model.cfg.num_layers, unit="layers") as advance:
        for layer in range(model.cfg.num_layers):
            stop.check("while analysing gates")
            gates = {gate: gates_of_layer(activations, texts, gate, layer) for gate in GATES}
            result, repetition_SR = _prototypes(
                model, layer, gates, texts, settings, report_texts, half_SN
            )
            repetitions.append(repetition_SR)
            # With shared routing, the first layer reads with its write gate.
            if layer or not mixer.shared_routing:
                lags.append(lag.of_layer(gates["write"], gates["read"], texts.token_mask_NT))
                result = _with_lags(result, lags[-1])
            result = [_labelled(each, model, report_texts, judge) for each in result]
            for r in (r for at, r in drawn if at == layer):
                chosen = rng.choice(N, min(N, settings.top), replace=False)
                random = [
                    (
                        report_texts.index(int(text)),
                        gates["write"][text, texts.token_mask_NT[text], r],
                    )
                    for text in chosen
                ]
                with about(unit=f"random texts {len(baseline)}", model=units.identity(model)):
                    label = judge.label(report_texts.marked(random))
                baseline.append(RandomTexts(tuple(text for text, _ in random), label))
            layers.append(_layer(layer, gates, texts, result, counts_SN))
            prototypes.extend(result)
            advance()
    if settings.ablated:
        prototypes = ablations.with_ablations(
            model, texts, report_texts, prototypes, settings.ablated
        )
    # Predictions are attributed to the prototypes of models with one head alone.
    if settings.ablated and mixer.heads == 1:
        tops = [top for each in prototypes for top in each.top_texts[: settings.ablated]]
        ablations.add_carried(model, texts, report_texts, tops)
    unit_settings = units.UnitSettings(
        settings.length, settings.top, settings.rank_by, settings.seed, counts_SN
    )
    comparisons = [
        units.compare(one, texts, unit_settings, report_texts, judge, features=len(prototypes))
        for one in compared
    ]

    return ConceptReport(
        schema=results.NAME,
        version=results.VERSION,
        model=model.described(results.Model, perplexity=texts.perplexity(slice(None))),
        settings=Settings(
            split=settings.split,
            texts=N,
            length=settings.length,
            top=settings.top,
            rank_by=settings.rank_by,
            resamples=settings.resamples,
            seed=settings.seed,
            tokens=int(texts.token_mask_NT.sum()),
            judge=judge.name,
        ),
        texts=tuple(report_texts.entries),
        layers=tuple(layers),
        prototypes=tuple(prototypes),
        half_life_repetition=_locality(prototypes, np.hstack(repetitions), N, settings),
        lag=_lag(prototypes, lag.tests(lags, resamples=settings.resamples, seed=settings.seed)),
        baseline=tuple(baseline) if draws else None,
        comparisons=tuple(comparisons),
    )


def _labelled(
    prototype: Prototype, model: TrainedModel, report_texts: ReportTexts, judge: Judge
) -> Prototype:
    """A prototype with the judge's label of its top texts."""
    marked = report_texts.marked([(t.text, t.write) for t in prototype.top_texts])
    unit = f"L{prototype.layer} P{prototype.prototype}"
    with about(unit=unit, model=units.identity(model)):
        return dataclasses.replace(prototype, label=judge.label(marked))


def _prototypes(
    model: TrainedModel,
    layer: int,
    gates: Mapping[str, np.ndarray],
    texts: Texts,
    settings: ConceptConfig,
    report_texts: ReportTexts,
    half_SN: np.ndarray,
) -> tuple[list[Prototype], np.ndarray]:
    """Entries of a layer's prototypes, without lags and labels, and repetition in samples.

    The repetition is `[S, R]`, over S samples of the texts.
    """
    token_mask_NT = texts.token_mask_NT
    token_M = texts.token_NT[token_mask_NT]
    measured = {
        gate: measures.of_prototypes(gate_NTR[token_mask_NT], token_M, seed=settings.seed)
        for gate, gate_NTR in gates.items()
    }
    write_NTR = gates["write"]
    best_tokens = ranking.top_tokens(
        token_M, write_NTR[token_mask_NT], settings.top, settings.rank_by
    )
    mean_NR, sum_NR = ranking.text_scores(write_NTR, token_mask_NT)
    score_NR = mean_NR if settings.rank_by == "mean" else sum_NR
    logit_R = np.asarray(model.params["blocks"]["mixer"]["decay_logit"][layer], np.float32)
    decay_R, half_life_R = special.expit(logit_R), measures.half_life(logit_R)

    entries, repetitions = [], []
    for r in range(len(logit_R)):
        best = ranking.top_texts(score_NR[:, r], settings.top)
        gates_of_r = texts.token_NT, write_NTR[..., r], token_mask_NT
        repeated = ranking.repetition(*gates_of_r, best)
        repetitions.append(
            ranking.repetition_of_samples(*gates_of_r, score_NR[:, r], settings.top, half_SN)
        )
        entries.append(
            Prototype(
                layer=layer,
                prototype=r,
                decay=float(decay_R[r]),
                half_life=float(half_life_R[r]) if decay_R[r] < 1 else None,
                write=measured["write"][r],
                read=measured["read"][r],
                repetition=repeated,
                lag=None,
                cross_correlation=(None,) * len(lag.LAGS),
                top_tokens=spelled_tokens(model.tokenizer, best_tokens[r]),
                top_texts=_top_texts(best, r, float(decay_R[r]), gates, texts, report_texts),
                label=None,
            )
        )
    return entries, np.stack(repetitions, axis=1)


def _top_texts(
    chosen: np.ndarray,
    r: int,
    decay: float,
    gates: Mapping[str, np.ndarray],
    texts: Texts,
    report_texts: ReportTexts,
) -> tuple[TopText, ...]:
    """The chosen texts with the gates of prototype r of a layer."""
    write_NT, read_NT = (gates[gate][chosen, :, r] for gate in GATES)
    memory_NT = measures.memory(write_NT, decay)
    entries = []
    for n, text in enumerate(chosen):
        counted_T = texts.token_mask_NT[text]
        write_T, read_T, memory_T = (x[n][counted_T] for x in (write_NT, read_NT, memory_NT))
        entries.append(
            TopText(
                text=report_texts.index(int(text)),
                mean=float(write_T.mean(dtype=np.float64)),
                sum=float(write_T.sum(dtype=np.float64)),
                write=measures.rounded(write_T),
                read=measures.rounded(read_T),
                memory=measures.rounded(memory_T),
            )
        )
    return tuple(entries)


def _with_lags(prototypes: Sequence[Prototype], of_layer: lag.LayerLag) -> list[Prototype]:
    return [
        dataclasses.replace(
            each,
            cross_correlation=tuple(map(finite, correlation_K)),
            lag=lag.LAGS[int(correlation_K.argmax())] if np.isfinite(correlation_K).all() else None,
        )
        for each, correlation_K in zip(prototypes, of_layer.correlation_RK, strict=True)
    ]


def _layer(
    layer: int,
    gates: Mapping[str, np.ndarray],
    texts: Texts,
    prototypes: Sequence[Prototype],
    counts_SN: np.ndarray,
) -> Layer:
    text_M = np.nonzero(texts.token_mask_NT)[0]

    def measured(gate: str, of_prototypes: list[PrototypeGate]) -> results.LayerGate:
        gate_MR = gates[gate][texts.token_mask_NT]
        return measures.of_layer(gate_MR, text_M, of_prototypes, counts_SN)

    return Layer(
        layer=layer,
        write=measured("write", [each.write for each in prototypes]),
        read=measured("read", [each.read for each in prototypes]),
    )


def _locality(
    prototypes: Sequence[Prototype], resampled_SQ: np.ndarray, texts: int, settings: ConceptConfig
) -> results.Locality:
    known_Q = np.array([each.half_life is not None for each in prototypes])
    half_life_Q, repetition_Q, layer_Q = (
        np.array([getattr(each, name) for each in prototypes if each.half_life is not None])
        for name in ("half_life", "repetition", "layer")
    )
    return locality.half_life_repetition(
        half_life_Q,
        repetition_Q,
        layer_Q,
        resampled_SQ[:, known_Q],
        texts=texts,
        seed=settings.seed,
    )


def _lag(prototypes: Sequence[Prototype], result: lag.LagTests) -> results.Lag:
    peaks = [each.lag for each in prototypes if each.lag is not None]
    correlations = [each.cross_correlation for each in prototypes if each.lag is not None]
    mean = (
        np.mean(np.array(correlations, float), axis=0).tolist() if peaks else [None] * len(lag.LAGS)
    )
    return results.Lag(
        lags=lag.LAGS,
        mean=tuple(mean),
        lead=result.lead,
        own_lead=result.own_lead,
        peaks_one_before=peaks.count(-1) / len(peaks) if peaks else None,
    )
