"""Units of models without prototypes on the same texts: heads by value norm, features of an SAE.

Prototype Transformer, appendix A.8, compares prototypes with the "value norms" of LLaMA's heads
(Figs. 9 and 24) and defines them no further. Here the activation of head h at a token x is
|v_h(x)|, the length of the value that the head gives to later tokens: like a write gate, it does
not depend on who reads. Features are of a small sparse autoencoder (`sae.py`) of the residual
stream in the middle of the model, as many as there are prototypes.

Units are ranked, spelled and judged as prototypes are (`ranking.py`), and Eq. 3 to 6 are of their
activations in the place of write gates.
"""

from collections.abc import Sequence
import dataclasses
from pathlib import Path
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import BadInputError, UsageError
from lm_jax.evaluate.answers import about
from lm_jax.evaluate.judge import Judge
from lm_jax.model import sites
from lm_jax.model.mixers import AttentionMixer
from lm_jax.run import progress, stop
from lm_jax.statistics import Interval
from lm_jax.text.examples import Examples
from lm_jax.text.prepared import open_prepared
from protot_jax.studies.concepts import collect, measures, ranking, resampling, sae
from protot_jax.studies.concepts.collect import Texts
from protot_jax.studies.concepts.examples import ReportTexts, spelled_tokens
from protot_jax.studies.concepts.unit_results import (
    Autoencoder,
    Unit,
    UnitComparison,
    UnitLayer,
    UnitText,
)
from protot_jax.training.exported import is_exported
from protot_jax.training.saved_run import DATA, TrainedModel, load_run, run_names, split_seed

Kind = Literal["heads", "sae"]
KINDS: tuple[Kind, ...] = get_args(Kind)
BATCH = 64


@dataclasses.dataclass(frozen=True)
class Compared:
    """A kind of units, and the model that has them with its name and work folder."""

    kind: Kind
    name: str
    folder: Path
    model: TrainedModel


@dataclasses.dataclass(frozen=True)
class UnitSettings:
    """What the units are ranked and resampled with; `length` is that of the texts."""

    length: int
    top: int
    rank_by: ranking.RankBy
    seed: int
    counts_SN: np.ndarray


def load(named: Sequence[str], first: TrainedModel, *, best: bool = True) -> list[Compared]:
    """Loads the models of comparisons, each named KIND:RUN; a run may be the folder of a seed.

    Raises:
      UsageError: another kind, a model without heads whose heads are asked for, or an autoencoder
        of an exported model.
      BadInputError: a run has another tokenizer than `first`, or as `load_run`.
    """
    result = []
    for text in named:
        kind, _, place = text.partition(":")
        if kind not in KINDS or not place:
            raise UsageError(f"compare = {text!r} is not of the form heads:RUN or sae:RUN")
        folder, seed = split_seed(Path(place))
        if kind == "sae" and is_exported(folder):
            raise UsageError(
                f"compare = {text!r}: an autoencoder is trained on training text, and an exported "
                "model has none; name its run"
            )
        model = load_run(folder, seed=seed, best=best)
        if kind == "heads" and not isinstance(model.mixer, AttentionMixer):
            raise UsageError(
                f"compare = {text!r}: the run trained {model.config.model!r}, which has no "
                "attention heads; name a run of 'llama'"
            )
        if model.tokenizer.sha256 != first.tokenizer.sha256:
            raise BadInputError(
                f"compare = {text!r}: the run has another tokenizer, so it cannot read the same "
                "texts; name a run on the same prepared data"
            )
        name = f"{run_names([folder], [model])[0]}, seed {model.seed}"
        result.append(Compared(kind, name, folder, model))
    return result


def compare(
    compared: Compared,
    texts: Texts,
    settings: UnitSettings,
    report_texts: ReportTexts,
    judge: Judge,
    *,
    features: int,
) -> UnitComparison:
    """Reads the texts with a model and describes its units; `features` are of the autoencoder.

    Raises:
      BadInputError, CorruptError: the run's training text cannot be used.
      StoppedError: the command was asked to stop.
    """
    model, mask_NT, fit = compared.model, texts.token_mask_NT, None
    if compared.kind == "heads":
        loss_NT, activation_LNTU = _over(model, texts.token_NT, "attn.v", _lengths)
        layers = dict(enumerate(activation_LNTU))
    else:
        layer = (model.cfg.num_layers - 1) // 2
        trained, tokens = _autoencoder(compared, layer, features, settings)
        loss_NT, resid_LNTD = _over(model, texts.token_NT, "resid_post", sites.keep)
        resid_MD = resid_LNTD[layer][mask_NT]
        activation_NTU = np.zeros((*mask_NT.shape, features), np.float32)
        activation_NTU[mask_NT] = trained.encode(jnp.asarray(resid_MD))
        layers = {layer: activation_NTU}
        fit = Autoencoder(
            features, trained.active, sae.STEPS, tokens, sae.unexplained(trained, resid_MD)
        )
    described, units = [], []
    for layer, activation_NTU in layers.items():
        stop.check("while comparing units")
        own = _units(
            layer, activation_NTU, texts, settings, report_texts, judge, model, compared.kind
        )
        described.append(_layer(layer, activation_NTU, mask_NT, own, settings.counts_SN))
        units += own
    read = dataclasses.replace(texts, loss_NT=loss_NT)
    return UnitComparison(
        kind=compared.kind,
        run=compared.name,
        model=model.config.model,
        step=model.step,
        sha256=model.sha256,
        perplexity=read.perplexity(slice(None)),
        layers=tuple(described),
        units=tuple(units),
        autoencoder=fit,
    )


def _lengths(v_BSKH: jax.Array) -> jax.Array:
    return jnp.linalg.norm(v_BSKH.astype(jnp.float32), axis=-1)


def _over(
    model: TrainedModel, token_NT: np.ndarray, site: str, reducer: sites.Reducer
) -> tuple[np.ndarray, np.ndarray]:
    """Losses as in `Texts`, and what a reducer keeps of a site, `[L, N, T, ...]`."""
    losses, kept = [], []
    for first in range(0, len(token_NT), BATCH):
        stop.check("while reading texts")
        part_NT = token_NT[first : first + BATCH]
        n = len(part_NT)
        tokens_BT = np.pad(part_NT, ((0, BATCH - n), (0, 0)))
        loss_BT, records = jax.device_get(collect.read(model, tokens_BT, ((site, reducer),)))
        loss_NT = np.full(part_NT.shape, np.nan, np.float32)
        loss_NT[:, 1:] = np.where(part_NT[:, 1:] != 0, loss_BT[:n], np.nan)
        losses.append(loss_NT)
        kept.append(records[site][:, :n])
    return np.concatenate(losses), np.concatenate(kept, axis=1)


def _autoencoder(
    compared: Compared, layer: int, features: int, settings: UnitSettings
) -> tuple[sae.SparseAutoencoder, int]:
    """An autoencoder of the stream that leaves a layer, and the tokens that it was trained on."""
    examples = Examples(
        open_prepared(compared.folder / DATA, tokenizer=compared.model.tokenizer),
        "train",
        context=settings.length - 1,
        mode="truncate",
    )
    marks = collect.marks(compared.model.tokenizer)
    parts = []
    with progress.track("read for the autoencoder", sae.TEXTS, unit="texts") as advance:
        for part in collect.long_enough(examples, marks, sae.TEXTS, BATCH):
            _, resid_LNTD = _over(compared.model, part.token_NT, "resid_post", sites.keep)
            parts.append(resid_LNTD[layer][part.token_mask_NT])
            advance(len(part.token_NT))
    if not parts:
        raise BadInputError(f"{examples.prepared.folder}: no training text is long enough")
    x_MD = np.concatenate(parts)
    active = min(sae.ACTIVE, features)
    return sae.train(x_MD, features=features, seed=settings.seed, active=active), len(x_MD)


def identity(model: TrainedModel) -> str:
    """Kind, seed, step and digest of a model, as lines of answers name it."""
    digest = model.checkpoint_sha256[:16]
    return f"{model.config.model}, seed {model.seed}, step {model.step}, {digest}"


def _units(
    layer: int,
    activation_NTU: np.ndarray,
    texts: Texts,
    settings: UnitSettings,
    report_texts: ReportTexts,
    judge: Judge,
    model: TrainedModel,
    kind: str,
) -> list[Unit]:
    mask_NT = texts.token_mask_NT
    token_M, activation_MU = texts.token_NT[mask_NT], activation_NTU[mask_NT]
    shuffled_M = np.random.default_rng(settings.seed).permutation(token_M)
    best_tokens = ranking.top_tokens(token_M, activation_MU, settings.top, settings.rank_by)
    mean_NU, sum_NU = ranking.text_scores(activation_NTU, mask_NT)
    score_NU = mean_NU if settings.rank_by == "mean" else sum_NU
    units = []
    letter = "H" if kind == "heads" else "F"
    for u, activation_M in enumerate(activation_MU.T):
        best = ranking.top_texts(score_NU[:, u], settings.top)
        top_texts = tuple(
            UnitText(
                report_texts.index(int(text)),
                float(mean_NU[text, u]),
                measures.rounded(own[mask_NT[text]]),
            )
            for text, own in ((text, activation_NTU[text, :, u]) for text in best)
        )
        with about(unit=f"L{layer} {letter}{u}", model=identity(model)):
            label = judge.label(report_texts.marked([(t.text, t.activation) for t in top_texts]))
        units.append(
            Unit(
                layer=layer,
                unit=u,
                mean=float(activation_M.mean(dtype=np.float64)),
                max=float(activation_M.max()),
                active=float((activation_M > 0).mean()),
                mutual_information=measures.mutual_information(token_M, activation_M),
                mutual_information_by_chance=measures.mutual_information(shuffled_M, activation_M),
                repetition=ranking.repetition(
                    texts.token_NT, activation_NTU[..., u], mask_NT, best
                ),
                top_tokens=spelled_tokens(model.tokenizer, best_tokens[u]),
                top_texts=top_texts,
                label=label,
            )
        )
    return units


def _layer(
    layer: int,
    activation_NTU: np.ndarray,
    mask_NT: np.ndarray,
    units: Sequence[Unit],
    counts_SN: np.ndarray,
) -> UnitLayer:
    text_M, activation_MU = np.nonzero(mask_NT)[0], activation_NTU[mask_NT]
    # Where no feature is active there is nothing to concentrate.
    some_M = activation_MU.sum(1) > 0
    text_M, activation_MU = text_M[some_M], activation_MU[some_M]
    of_tokens = [measure(activation_MU) for measure in _CONCENTRATION]
    N = counts_SN.shape[1]
    sums_NF = np.stack([np.bincount(text_M, values_M, minlength=N) for values_M in of_tokens], 1)
    tokens_N = np.bincount(text_M, minlength=N)
    intervals = [
        Interval(*ends, len(text_M)) for ends in resampling.means(sums_NF, tokens_N, counts_SN)
    ]
    return UnitLayer(
        layer,
        len(units),
        *intervals,
        mutual_information=float(np.mean([one.mutual_information for one in units])),
        mutual_information_by_chance=float(
            np.mean([one.mutual_information_by_chance for one in units])
        ),
        dead=sum(one.active == 0 for one in units),
    )


_CONCENTRATION = (measures.l1_ratio, measures.gini, measures.entropy)
