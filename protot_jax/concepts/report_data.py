"""The concept report as data: everything that `schema.SCHEMA` describes, from collected gates.

One layer at a time is in memory (`collect.gates_of_layer`); what stays of it are its numbers and
the gates of the texts that the report shows.
"""

from collections.abc import Mapping, Sequence
import dataclasses
import math
import os
from typing import Any

import numpy as np
from scipy import special

from lm_jax.model.decoder import count_params
from lm_jax.run import progress, stop
from protot_jax.concepts import lag, locality, measures, ranking, resampling, schema
from protot_jax.concepts.collect import GATES, Texts, gates_of_layer
from protot_jax.concepts.examples import Shown, spelled
from protot_jax.concepts.judge import Judge, NullJudge
from protot_jax.saved_run import TrainedModel

# Sets of random texts that a judge sees for comparison.
BASELINE_DRAWS = 10
# Gates are kept in float16, which has no more digits.
_DIGITS = 5


@dataclasses.dataclass(frozen=True)
class ConceptConfig:
    """What was asked for; `texts` is the most, of which there may be fewer.

    `resamples` counts the samples of texts and of prototypes, and the permutations, of every test.
    """

    split: str = "validation"
    texts: int = 4_000
    length: int = 32
    top: int = 10
    rank_by: ranking.RankBy = "mean"
    resamples: int = 1_000
    seed: int = 0


def build_report_data(
    model: TrainedModel,
    texts: Texts,
    activations: str | os.PathLike[str],
    settings: ConceptConfig,
    judge: Judge,
) -> dict[str, Any]:
    """The report's data.

    Args:
      model: whose gates they are.
      texts: as `collect` returned them.
      activations: the file that it wrote.
      settings: of the analysis.
      judge: names themes; a null judge sees no random texts either.

    Raises:
      UsageError: the model has no prototypes.
      StoppedError: the command was asked to stop.
    """
    mixer, N = model.prototypes, len(texts.document_N)
    rng = np.random.default_rng(settings.seed)
    draws = 0 if isinstance(judge, NullJudge) else BASELINE_DRAWS
    drawn = rng.integers([model.cfg.num_layers, mixer.num_prototypes], size=(draws, 2))
    shown = Shown(model.tokenizer, texts)
    counts_SN = resampling.bootstrap_counts(N, settings.resamples, settings.seed)
    half_SN = resampling.half_samples(N, settings.resamples, settings.seed)

    layers, prototypes, lags, repetitions, baseline = [], [], [], [], []
    with progress.track("analyse", model.cfg.num_layers, unit="layers") as advance:
        for layer in range(model.cfg.num_layers):
            stop.check("while analysing gates")
            gates = {gate: gates_of_layer(activations, texts, gate, layer) for gate in GATES}
            result, repetition_SR = _prototypes(
                model, layer, gates, texts, settings, shown, half_SN
            )
            repetitions.append(repetition_SR)
            # The first layer then reads with its write gate.
            if layer or not mixer.shared_routing:
                lags.append(lag.of_layer(gates["write"], gates["read"], texts.token_mask_NT))
                _add_lags(result, lags[-1])
            for each in result:
                each["label"] = judge.label(shown.marked(each["top_texts"]))
            for r in (r for at, r in drawn if at == layer):
                chosen = rng.choice(N, min(N, settings.top), replace=False)
                random = [
                    {
                        "text": shown.place(int(text)),
                        "write": gates["write"][text, texts.token_mask_NT[text], r],
                    }
                    for text in chosen
                ]
                label = judge.label(shown.marked(random))
                baseline.append({"texts": [each["text"] for each in random], "label": label})
            layers.append(_layer(layer, gates, texts, result, counts_SN))
            prototypes.extend(result)
            advance()

    return {
        "schema": schema.NAME,
        "version": schema.VERSION,
        "model": _model(model, texts),
        "settings": {
            **dataclasses.asdict(settings),
            "texts": N,
            "tokens": int(texts.token_mask_NT.sum()),
            "judge": judge.name,
        },
        "texts": shown.entries,
        "layers": layers,
        "prototypes": prototypes,
        "half_life_repetition": _locality(prototypes, np.hstack(repetitions), N, settings),
        "lag": _lag(prototypes, lag.tests(lags, resamples=settings.resamples, seed=settings.seed)),
        "baseline": baseline if draws else None,
    }


def _model(model: TrainedModel, texts: Texts) -> dict[str, Any]:
    cfg, mixer = model.cfg, model.prototypes
    return {
        "seed": model.seed,
        "step": model.step,
        "layers": cfg.num_layers,
        "prototypes": mixer.num_prototypes,
        "hidden_size": cfg.hidden_size,
        "context": cfg.max_length,
        "vocab_size": cfg.vocab_size,
        "parameters": count_params(cfg, mixer=mixer),
        "shared_routing": mixer.shared_routing,
        "corpus": model.config.corpus.source,
        "perplexity": texts.perplexity(slice(None)),
    }


def _prototypes(
    model: TrainedModel,
    layer: int,
    gates: Mapping[str, np.ndarray],
    texts: Texts,
    settings: ConceptConfig,
    shown: Shown,
    half_SN: np.ndarray,
) -> tuple[list[dict[str, Any]], np.ndarray]:
    """The entries of a layer's prototypes, as yet without lags and labels.

    And their repetition in samples of the texts, `[S, R]`.
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
            {
                "layer": layer,
                "prototype": r,
                "decay": float(decay_R[r]),
                "half_life": float(half_life_R[r]) if decay_R[r] < 1 else None,
                "write": measured["write"][r],
                "read": measured["read"][r],
                "repetition": repeated,
                "lag": None,
                "cross_correlation": [None] * len(lag.LAGS),
                "top_tokens": [
                    {"token": spelled(model.tokenizer, token.id), **dataclasses.asdict(token)}
                    for token in best_tokens[r]
                ],
                "top_texts": _shown(best, r, float(decay_R[r]), gates, texts, shown),
                "label": None,
            }
        )
    return entries, np.stack(repetitions, axis=1)


def _shown(
    chosen: np.ndarray,
    r: int,
    decay: float,
    gates: Mapping[str, np.ndarray],
    texts: Texts,
    shown: Shown,
) -> list[dict[str, Any]]:
    """The `top_texts` entries of some texts for prototype r of a layer."""
    write_NT, read_NT = (gates[gate][chosen, :, r] for gate in GATES)
    memory_NT = measures.memory(write_NT, decay)
    entries = []
    for n, text in enumerate(chosen):
        counted_T = texts.token_mask_NT[text]
        write_T, read_T, memory_T = (x[n][counted_T] for x in (write_NT, read_NT, memory_NT))
        entries.append(
            {
                "text": shown.place(int(text)),
                "mean": float(write_T.mean(dtype=np.float64)),
                "sum": float(write_T.sum(dtype=np.float64)),
                "write": _rounded(write_T),
                "read": _rounded(read_T),
                "memory": _rounded(memory_T),
            }
        )
    return entries


def _add_lags(result: list[dict[str, Any]], of_layer: lag.LayerLag) -> None:
    for each, correlation_K in zip(result, of_layer.correlation_RK, strict=True):
        each["cross_correlation"] = [_known(c) for c in correlation_K]
        if np.isfinite(correlation_K).all():
            each["lag"] = lag.LAGS[int(correlation_K.argmax())]


def _layer(
    layer: int,
    gates: Mapping[str, np.ndarray],
    texts: Texts,
    result: Sequence[Mapping[str, Any]],
    counts_SN: np.ndarray,
) -> dict[str, Any]:
    text_M = np.nonzero(texts.token_mask_NT)[0]
    measured = {
        gate: measures.of_layer(
            gate_NTR[texts.token_mask_NT], text_M, [each[gate] for each in result], counts_SN
        )
        for gate, gate_NTR in gates.items()
    }
    return {"layer": layer, **measured}


def _locality(
    prototypes: list[dict[str, Any]], resampled_SQ: np.ndarray, texts: int, settings: ConceptConfig
) -> dict[str, Any]:
    known_Q = np.array([each["half_life"] is not None for each in prototypes])
    half_life_Q, repetition_Q, layer_Q = (
        np.array([each[name] for each in prototypes if each["half_life"] is not None])
        for name in ("half_life", "repetition", "layer")
    )
    result = locality.half_life_repetition(
        half_life_Q,
        repetition_Q,
        layer_Q,
        resampled_SQ[:, known_Q],
        texts=texts,
        seed=settings.seed,
    )
    return {
        "spearman": _tested(result.spearman),
        "cohens_d": _tested(result.cohens_d),
        "overall_spearman": _known(result.overall_spearman),
        "overall_cohens_d": _known(result.overall_cohens_d),
        "quartiles": [_known(mean) for mean in result.quartiles],
    }


def _lag(prototypes: list[dict[str, Any]], result: lag.LagTests) -> dict[str, Any]:
    peaks = [each["lag"] for each in prototypes if each["lag"] is not None]
    correlations = [each["cross_correlation"] for each in prototypes if each["lag"] is not None]
    mean = np.mean(correlations, axis=0).tolist() if peaks else [None] * len(lag.LAGS)
    return {
        "lags": list(lag.LAGS),
        "mean": mean,
        "lead": _tested(result.lead),
        "own_lead": _tested(result.own_lead),
        "peaks_one_before": peaks.count(-1) / len(peaks) if peaks else None,
    }


def _tested(result: resampling.Tested) -> dict[str, Any]:
    return {name: _known(value) for name, value in dataclasses.asdict(result).items()}


def _known(value: float) -> float | None:
    """What JSON can hold."""
    return value if isinstance(value, int) else float(value) if math.isfinite(value) else None


def _rounded(gate_T: np.ndarray) -> list[float]:
    return np.round(gate_T.astype(np.float64), _DIGITS).tolist()
