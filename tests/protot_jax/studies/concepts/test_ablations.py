"""A prototype left out and what it carries to a word, against the model and the decomposition."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

import lm_jax
from lm_jax.evaluate.judge import NullJudge
from lm_jax.text.examples import Examples
from lm_jax.text.prepared import open_prepared
import protot_jax
from protot_jax.studies import attribution
from protot_jax.studies.concepts import ablations, collect, numbers
from protot_jax.studies.concepts.settings import ConceptConfig
from tests.protot_jax.small_runs import save_untrained, settings

ABLATED = 2


def analysed(folder, path, **asked):
    """Model, texts and report of a run, with so many `ablated` texts of a prototype."""
    model = protot_jax.load_run(folder)
    examples = Examples(open_prepared(folder / "data"), "validation", context=11)
    texts = collect.collect(model, examples, path, texts=12, batch_size=8)
    config = ConceptConfig(texts=12, length=12, top=3, resamples=99, **asked)
    return model, texts, numbers.summarise(model, texts, path, config, NullJudge())


@pytest.fixture(scope="module")
def built(run, tmp_path_factory):
    """Of a run with 2 layers of 4 prototypes."""
    path = tmp_path_factory.mktemp("ablations") / "gates.parquet"
    return analysed(run, path, ablated=ABLATED)


def rows_of(report, texts, entry):
    (row,) = np.flatnonzero(texts.document_N == report.texts[entry].document)
    return texts.token_NT[row], texts.token_mask_NT[row]


def log_probability(model, tokens_T, changes):
    """Log probability `[T]` of each token, NaN for the first, from a forward pass of one text."""
    tokens_T = tokens_T[tokens_T != 0]
    out = lm_jax.forward(
        model.params, jnp.asarray(tokens_T)[None], model.cfg, mixer=model.mixer, edits=changes
    )
    log_p_TV = jax.nn.log_softmax(out.logits[0])
    return np.r_[np.nan, np.asarray(log_p_TV)[np.arange(len(tokens_T) - 1), tokens_T[1:]]]


def test_the_effect_is_that_of_the_public_edit(built):
    """And its percentile is among the other prototypes of the layer, on the same texts."""
    model, texts, report = built
    entry = next(one for one in report.prototypes if one.layer == 1)
    tops = entry.top_texts[:ABLATED]
    mean_R = []
    for r in range(4):
        changes = protot_jax.edit(layer=1, prototype=r, mode=ablations.MODE)
        found = []
        for top in tops:
            tokens_T, mask_T = rows_of(report, texts, top.text)
            edited_T, clean_T = (log_probability(model, tokens_T, x) for x in (changes, {}))
            change_T = (edited_T - clean_T)[mask_T[: len(clean_T)]]
            if r == entry.prototype:
                assert len(top.ablated) == len(change_T)
                # Stored with four digits; logits of a few units in float32.
                np.testing.assert_allclose(
                    np.array(top.ablated, float), change_T, rtol=0, atol=0.5e-4 + 1e-5
                )
            found += change_T[~np.isnan(change_T)].tolist()
        mean_R.append(np.mean(found))
    assert entry.ablation.change == pytest.approx(mean_R[entry.prototype], abs=1e-5)
    assert abs(entry.ablation.change) > 1e-3
    others = [-mean for r, mean in enumerate(mean_R) if r != entry.prototype]
    wanted = stats.percentileofscore(others, -mean_R[entry.prototype], kind="mean")
    assert entry.ablation.harm_percentile == pytest.approx(wanted)
    assert (entry.ablation.controls, entry.ablation.texts) == (3, ABLATED)


def test_only_the_first_texts_are_measured(built):
    _, _, report = built
    for one in report.prototypes:
        assert [bool(top.ablated) for top in one.top_texts] == [True, True, False]
    measured = {top.text for one in report.prototypes for top in one.top_texts[:ABLATED]}
    assert {i for i, text in enumerate(report.texts) if text.carried} == measured


def test_what_is_carried_is_the_direct_part_of_the_decomposition(built):
    model, texts, report = built
    entry = report.prototypes[0].top_texts[0].text
    tokens_T, mask_T = rows_of(report, texts, entry)
    carried = report.texts[entry].carried
    shown = np.flatnonzero(mask_T)
    assert {len(column) for column in dataclasses.astuple(carried)} == {len(shown)}
    for i in (2, len(shown) - 1):
        at = shown[i]
        # The prompt ends before the token, which is the target.
        result = attribution.attribute(model, tokens_T[:at], targets=[int(tokens_T[at])])
        direct_LNS = np.asarray(result.direct_XLNS[0], np.float64)
        logit_LN = direct_LNS.sum(-1)
        order = np.argsort(-np.abs(logit_LN).ravel())[: ablations.LISTED]
        wanted = [(int(m // 4), int(m % 4)) for m in order]
        assert list(zip(carried.layer[i], carried.prototype[i], strict=True)) == wanted
        for n, (layer, prototype) in enumerate(wanted):
            parts_S = direct_LNS[layer, prototype]
            k = int(np.argmax(np.abs(parts_S)))
            # Printed with three digits.
            assert carried.logit[i][n] == pytest.approx(parts_S.sum(), abs=0.6e-3)
            assert carried.part[i][n] == pytest.approx(parts_S[k], abs=0.6e-3)
            assert carried.source[i][n] == (list(shown).index(k) if k in shown else -1)


@pytest.mark.parametrize("ablated", [0, 1])
def test_a_model_of_several_heads_is_reported_without_what_is_carried(text, ablated, tmp_path):
    config = settings(text, dtype="float32", seeds=(1,))
    config.prototypes.update({"num_prototypes": 4, "heads": 2})
    folder = save_untrained(config, tmp_path / "run")
    *_, report = analysed(folder, tmp_path / "gates.parquet", ablated=ablated)
    assert report.model.heads == 2
    assert {one.ablation is not None for one in report.prototypes} == {bool(ablated)}
    assert all(text.carried is None for text in report.texts)
