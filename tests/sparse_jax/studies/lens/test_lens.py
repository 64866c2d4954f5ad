"""The lens study: what it compares is what the lenses read, and what cannot be read is named."""

import dataclasses

import jax
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.inspect import jacobian_lens, lens_split
from lm_jax.model.layers import unembedding
from lm_jax.run.results import load_result
from lm_jax.study import frame
from lm_jax.text import corpora
from lm_jax.text.preparation import CorpusConfig
from lm_jax.weights.lenses import load_lens, save_lens
from sparse_jax.circuits.runs import HeldGates
from sparse_jax.gates import model as sparse_model
from sparse_jax.gates.model import constant_gates
from sparse_jax.studies.lens import STUDY, report, run
from sparse_jax.studies.lens.results import JACOBIAN, LOGIT, LensSummary
from sparse_jax.studies.lens.settings import LensConfig
from tests.sparse_jax.small_runs import golden_base, save_base, write_text

PROMPT = "the capital is"


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lens")
    return LensConfig(
        model=str(save_base(folder / "model")),
        prompts=(PROMPT,),
        corpus=CorpusConfig(str(write_text(folder / "text")), "document", splits=(1.0, 0.0, 0.0)),
        texts=3,
        held_out=2,
        context=20,
        rows=16,
        skipped=2,
    )


@pytest.fixture(scope="module")
def done(config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    frame.execute(STUDY, config, folder)
    return folder


def test_comparisons_are_those_of_the_two_lenses_text_by_text(config, done):
    summary = load_result(done / "summary.json", LensSummary)
    model = lm_jax.load_pretrained(config.model)
    lens = load_lens(done / "lens.safetensors")
    held_out, _ = run._texts(config, run.SourceModel.load(config.model))
    sums = {LOGIT: np.zeros((2, 2)), JACOBIAN: np.zeros((2, 2))}
    tokens = 0
    for ids in held_out:
        out = model.run(list(ids), record=["resid_post"])
        log_p_TV = np.asarray(jax.nn.log_softmax(out.logits[0]), np.float64)
        counted = slice(config.skipped, len(ids) - 1)
        tokens += len(ids) - 1 - config.skipped
        for layer, h_BTD in enumerate(out.cache["resid_post"]):
            read = {
                LOGIT: lm_jax.logit_lens(model.params, h_BTD, model.cfg),
                JACOBIAN: lens.logits(model.params, model.cfg, h_BTD, layer),
            }
            for name, logits in read.items():
                q_TV = np.exp(np.asarray(logits[0], np.float64))
                log_q_TV = np.log(q_TV / q_TV.sum(-1, keepdims=True))
                kl_T = (np.exp(log_p_TV) * (log_p_TV - log_q_TV)).sum(-1)
                same_T = log_p_TV.argmax(-1) == log_q_TV.argmax(-1)
                sums[name][layer] += kl_T[counted].sum(), same_T[counted].sum()
    assert summary.tokens == tokens
    for each in summary.layers:
        for name in (LOGIT, JACOBIAN):
            divergence, agreeing = sums[name][each.layer] / tokens
            assert each.divergence[name] == pytest.approx(divergence, abs=1e-5)
            assert each.agreeing[name] == pytest.approx(agreeing, abs=1e-9)
    # The last layer is the model itself.
    assert summary.layers[-1].agreeing == {LOGIT: 1.0, JACOBIAN: 1.0}
    assert max(summary.layers[-1].divergence.values()) < 1e-6


def test_the_lens_is_that_of_the_texts_behind_those_held_out(config, done):
    source = run.SourceModel.load(config.model)
    each = (source.tokenizer.encode(text) for _, text in corpora.documents(config.corpus.source))
    texts = [ids[:20] for ids in each if len(ids) >= 4][2:5]
    wanted = jacobian_lens.fit(source.model, texts, length=20, rows=16, skipped=2)
    lens = load_lens(done / "lens.safetensors")
    np.testing.assert_allclose(lens.matrix_SDD, wanted.matrix_SDD, rtol=2.0**-10, atol=1e-4)
    assert (lens.prompts, lens.rows, lens.model) == (3, 16, config.model)


def test_prompts_are_read_by_layer_and_position(config, done):
    rows = pq.read_table(done / "readouts.parquet").to_pylist()
    model = lm_jax.load_pretrained(config.model)
    # Without the token that ends a text.
    ids = model.tokenizer.encode(PROMPT)[:-1]
    assert [row["token"] for row in rows[: len(ids)]] == [model.tokenizer.piece(i) for i in ids]
    assert len(rows) == 2 * 2 * len(ids)
    tops = model.run(ids).logit_lens(1)
    for row in rows:
        if row["lens"] == LOGIT and row["position"] == len(ids) - 1:
            ((token, probability),) = tops[row["layer"]]
            assert row["read"] == token and row["probability"] == pytest.approx(
                probability, rel=1e-4
            )
    page = (done / "report.html").read_text()
    assert "Read: the capital is" in page and "Jacobian lens, last layer first" in page


def test_readouts_are_split_by_heads(config, done, tmp_path):
    own = dataclasses.replace(config, lens=str(done / "lens.safetensors"), split=(0,))
    frame.execute(STUDY, own, tmp_path / "run")
    rows = pq.read_table(tmp_path / "run" / "split.parquet").to_pylist()
    source = run.SourceModel.load(config.model)
    model, lens = source.model, load_lens(done / "lens.safetensors")
    ids = model_ids(source)
    h_D = np.asarray(
        lm_jax.load_pretrained(config.model).run(ids, record=["resid_post"]).cache["resid_post"]
    )[0, 0, -1]
    token = int(np.asarray(lens.logits(model.params, model.cfg, h_D[None, None], 0))[0, 0].argmax())
    weight_D = np.asarray(unembedding(model.params, model.cfg)[token], np.float32)
    found = lens_split.split(
        model,
        run._texts(own, source)[0],
        layer=0,
        stream_D=h_D,
        readout_D=weight_D * np.asarray(model.params["final"]["scale"]),
        length=20,
        skipped=2,
    )
    assert [(row["at"], row["head"]) for row in rows] == [(1, n) for n in range(len(rows))]
    assert len(rows) == model.cfg.num_heads
    for row in rows:
        assert row["token"] == source.tokenizer.piece(token)
        assert row["share"] == pytest.approx(found.head_LN[1, row["head"]], rel=1e-4)
        assert row["total"] == pytest.approx(found.total, rel=1e-4)
        assert row["bypass"] == pytest.approx(found.bypass_L[1], rel=1e-4)
    page = (tmp_path / "run" / "report.html").read_text()
    largest = max(rows, key=lambda row: abs(row["share"]))
    assert f"1.{largest['head']} " in page and "Which heads carry a readout?" in page
    for changes, error, said in (
        ({"split": (1,)}, UsageError, r"config\.split: layer 1 is outside 0\.\.0"),
        ({"prompts": ()}, UsageError, r"config\.split splits readouts of prompts; name one"),
    ):
        with pytest.raises(error, match=said):
            frame.execute(STUDY, dataclasses.replace(own, **changes), tmp_path / "other")


def model_ids(source):
    """Ids of the prompt, without the token that ends a text."""
    return source.tokenizer.encode(PROMPT)[:-1]


def test_a_lens_that_is_there_is_read_in_place_of_a_fit(config, done, tmp_path):
    other = dataclasses.replace(config, lens=str(done / "lens.safetensors"))
    frame.execute(STUDY, other, tmp_path / "run")
    first, second = (
        load_result(each / "summary.json", LensSummary) for each in (done, tmp_path / "run")
    )
    assert first.layers == second.layers and not (tmp_path / "run" / "lens.safetensors").exists()


def test_a_fit_that_was_killed_goes_on_with_what_its_texts_gave(
    config, done, tmp_path, monkeypatch
):
    folder, real = tmp_path / "run", jacobian_lens.prompt_rows
    calls = []

    def killed(*args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(run, "_KEPT_AFTER", 1)
    monkeypatch.setattr(jacobian_lens, "prompt_rows", killed)
    with pytest.raises(KeyboardInterrupt):
        frame.execute(STUDY, config, folder)
    assert (folder / "sums.npz").is_file()
    frame.execute(STUDY, config, folder)
    assert len(calls) == 4 and not (folder / "sums.npz").exists()
    assert (folder / "lens.safetensors").read_bytes() == (done / "lens.safetensors").read_bytes()


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"context": 3}, UsageError, "config.context = 3 must be 4 or more"),
        ({"context": 99}, UsageError, "config.context = 99 is beyond the 32 positions"),
        ({"texts": 5_000}, BadInputError, "and 5002 are needed; lower config.texts"),
        ({"prompts": ("a " * 40,)}, BadInputError, r"config.prompts: 'a a .* tokens; give 1 to 32"),
    ],
)
def test_what_cannot_be_read_is_named(config, tmp_path, changes, error, said):
    with pytest.raises(error, match=said):
        frame.execute(STUDY, dataclasses.replace(config, **changes), tmp_path / "run")


def test_the_lens_of_another_model_is_refused(config, tmp_path):
    lens = jacobian_lens.JacobianLens(np.zeros((2, 5, 5), np.float32), 3, 1, 5, 0, np.zeros(2))
    save_lens(tmp_path / "lens.safetensors", lens)
    other = dataclasses.replace(config, lens=str(tmp_path / "lens.safetensors"))
    with pytest.raises(BadInputError, match=r"is of 3 layers of width 5, and .* has 2 of 16"):
        frame.execute(STUDY, other, tmp_path / "run")


def test_the_conclusion_says_from_which_layer_on(done):
    summary = load_result(done / "summary.json", LensSummary)
    low = dict.fromkeys((LOGIT, JACOBIAN), 0.2)
    first = dataclasses.replace(summary.layers[0], agreeing=low | {JACOBIAN: 0.7})
    said = report.conclusion(dataclasses.replace(summary, layers=(first, summary.layers[1])))
    assert said.endswith(
        "from layer 1 of 1 on by the logit lens and from layer 0 of 1 on by the Jacobian lens."
    )
    none = tuple(dataclasses.replace(each, agreeing=low) for each in summary.layers)
    assert "in no layer by the logit lens" in report.conclusion(
        dataclasses.replace(summary, layers=none)
    )


def test_a_sparse_model_is_read_with_its_gates_held(config, tmp_path):
    base = lm_jax.load_pretrained(config.model)
    sparse_model.save(tmp_path / "sparse", base, constant_gates(base.cfg, 0.3), {})
    own = dataclasses.replace(
        config, model=str(tmp_path / "sparse"), split=(0,), texts=2, held_out=1
    )
    frame.execute(STUDY, own, tmp_path / "run")
    rows = pq.read_table(tmp_path / "run" / "split.parquet").to_pylist()
    total = sum(row["share"] for row in rows) + rows[0]["bypass"]
    assert total == pytest.approx(rows[0]["total"], rel=1e-4)
    lens = load_lens(tmp_path / "run" / "lens.safetensors")
    source = run.SourceModel.load(own.model)
    _, texts = run._texts(own, source)
    wanted = jacobian_lens.fit(HeldGates(source.model), texts, length=20, rows=16, skipped=2)
    np.testing.assert_allclose(lens.matrix_SDD, wanted.matrix_SDD, rtol=2.0**-10, atol=1e-4)


def test_what_the_last_norm_takes_out_is_in_no_readout(config, tmp_path, monkeypatch):
    """Of a model with layer norm: the direction has no mean."""
    folder = golden_base(tmp_path / "gpt2", "gpt2")
    given = []
    real = run.lens_split.split
    monkeypatch.setattr(run.lens_split, "split", lambda *a, **k: given.append(k) or real(*a, **k))
    own = dataclasses.replace(
        config, model=str(folder), split=(0,), texts=2, held_out=1, rows=10**6
    )
    frame.execute(STUDY, own, tmp_path / "run")
    (options,) = given
    u_D = np.asarray(options["readout_D"])
    assert abs(u_D.mean()) < 1e-6 * np.abs(u_D).max() and np.abs(u_D).max() > 0
