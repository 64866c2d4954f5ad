"""Texts without answers: how they are cut, their loss under recipes, their diagnosis alone."""

import json
import math

import jax.numpy as jnp
import numpy as np
import pyarrow.parquet as pq
import pytest

import lm_jax
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.results import load_result
from polyattn_jax import recipe, suites
from polyattn_jax.audit.config import AuditConfig
from polyattn_jax.audit.results import CheckResult
from polyattn_jax.studies.check.results import DiagnosisResult
from polyattn_jax.suites.texts import QUERIES
from tests import rounding
from tests.polyattn_jax.conftest import TEXT_LENGTH as LENGTH


def test_a_plain_text_is_cut_into_pieces_that_each_begin_as_the_tokenizer_does(tmp_path, starting):
    path = tmp_path / "mine.txt"
    words = (["some", "small", "apple"] * 40)[: 2 * (LENGTH - 1) + 16]
    path.write_text(" ".join(words), "utf-8")
    suite = suites.load_texts(path, starting, length=LENGTH)
    # The rest of 17 tokens is kept, with the start token among them.
    assert [(p.id, len(p.tokens)) for p in suite.prompts] == [
        ("mine-0000", LENGTH),
        ("mine-0001", LENGTH),
        ("mine-0002", 17),
    ]
    assert {p.tokens[0] for p in suite.prompts} == {starting.bos_id}
    read = [token for prompt in suite.prompts for token in prompt.tokens[1:]]
    assert read == starting.encode(" ".join(words), add_special_tokens=False)
    for prompt in suite.prompts:
        positions = prompt.query_positions
        assert len(positions) == QUERIES and positions[-1] == len(prompt.tokens) - 2
        assert np.ptp(np.diff(positions)) <= 1
        assert list(prompt.target) == [prompt.tokens[q + 1] for q in positions]
    path.write_text(" ".join(words[:-1]), "utf-8")
    assert len(suites.load_texts(path, starting, length=LENGTH).prompts) == 2


def test_a_shipped_text_is_known_by_name_and_read_as_far_as_asked(tmp_path, starting, monkeypatch):
    words = " ".join(["some", "small", "apple"] * 40)
    monkeypatch.setitem(suites.texts.SHIPPED, "essays", lambda: words)
    (tmp_path / "essays.txt").write_text(words, "utf-8")
    named = suites.load_texts("essays", starting, length=LENGTH, n=2)
    read = suites.load_texts(tmp_path / "essays.txt", starting, length=LENGTH)
    assert named.prompts == read.prompts[:2] and len(read.prompts) > 2
    assert named.manifest["source_sha256"] == read.manifest["source_sha256"]
    # A file of that name is told apart by its folder.
    with pytest.raises(BadInputError, match="No such file"):
        suites.load_texts("./essays", starting, length=LENGTH)


def test_a_text_of_windows_is_that_of_any_other(tmp_path):
    file, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    file.write_bytes("\ufeffsome\r\napple\r".encode())
    assert suites.texts.read_texts(file)[0] == {"a": "some\napple\n"}
    row = {"id": "a", "text": "some\u2028\x85apple"}
    lines.write_bytes(b"\xef\xbb\xbf" + json.dumps(row, ensure_ascii=False).encode() + b"\r\n")
    assert suites.texts.read_texts(lines)[0] == {"a": "some\u2028\x85apple"}


def test_texts_that_cannot_be_read_are_refused(tmp_path, starting):
    short, broken = tmp_path / "short.txt", tmp_path / "broken.txt"
    short.write_text("some apple")
    broken.write_bytes(b"some \xff apple")
    lines = tmp_path / "mine.jsonl"
    lines.write_text('{"id": "a", "prompt": "some"}')
    for path, words in (
        (short, "text 'short' has 3 tokens: give 17 or more"),
        (broken, "not UTF-8 at byte 5"),
        (tmp_path / "none.txt", "No such file"),
        (lines, ":1: field 'text' is missing"),
    ):
        with pytest.raises(BadInputError, match=words):
            suites.load_texts(path, starting, length=LENGTH)
    with pytest.raises(UsageError, match="text_length = 16 must be at least 17"):
        AuditConfig("a", text_length=16)


def expected_losses(tiny, path, b_auto):
    """Mean loss of each text in float64 by recipe, with how far float32 may be off."""
    model = lm_jax.load_pretrained(tiny)
    results = {}
    for name in ("softmax", "relu_p4_bauto", "relu_p1_over_L"):
        attend = recipe(name, bias=b_auto)
        for row in map(json.loads, path.read_text().splitlines()):
            tokens = jnp.asarray([model.tokenizer.encode(row["text"])[:LENGTH]])

            def loss(tokens=tokens, attend=attend):
                logits = lm_jax.forward(model.params, tokens, model.cfg, attend=attend).logits
                own = jnp.take_along_axis(logits[:, :-1], tokens[:, 1:, None], axis=-1)[..., 0]
                top = logits.max(-1, keepdims=True)
                total = jnp.log(jnp.exp(logits - top).sum(-1)) + top[..., 0]
                return (total[:, :-1] - own).sum() / (tokens.shape[1] - 1)

            results[name, row["id"]] = rounding.expected(loss)
    return results


def test_an_audit_measures_the_loss_on_texts_under_every_recipe(asked, texts_file, tiny):
    folder, result, out = asked
    rows = pq.read_table(folder / "text_losses.parquet").to_pylist()
    wanted = expected_losses(tiny, texts_file, result.calibration.bias)
    losses = {(row["recipe"], row["prompt"]): np.float32(row["loss"]) for row in rows}
    for place, expected in wanted.items():
        rounding.assert_within(losses[place], expected, str(place))
    by_cell = {entry.cell: entry for entry in result.texts}
    weights = {row["prompt"]: row["length"] - 1 for row in rows}
    assert sorted(weights.values()) == [28, LENGTH - 1, LENGTH - 1]
    for name, entry in by_cell.items():
        losses = {row["prompt"]: row["loss"] for row in rows if row["cell"] == name}
        mean = np.average([losses[t] for t in weights], weights=[*weights.values()])
        assert entry.loss.estimate == pytest.approx(mean, rel=1e-12)
        before = by_cell["softmax"].loss.estimate
        assert entry.change.estimate == pytest.approx(mean - before, abs=1e-12)
        assert entry.change.low <= entry.change.estimate <= entry.change.high
        assert (entry.loss.n, entry.tokens) == (3, sum(weights.values()))
    assert by_cell["softmax"].change.high == 0.0 < by_cell["relu_p4_bauto"].change.estimate ** 2
    own = [entry for entry in result.prevalence if entry.suite == "texts"]
    assert {e.rows for e in own} == {3 * QUERIES * 3 * 4} and own[0].argmax_is_answer is None
    assert "Loss on your 3 texts (106 tokens), nats per token, and perplexity;" in out
    for name, entry in by_cell.items():
        # exp is monotone, so that the ends of an interval are those of its logarithm
        for power, exponent in (
            (entry.perplexity, entry.loss),
            (entry.perplexity_ratio, entry.change),
        ):
            for part in ("estimate", "low", "high"):
                wanted = math.exp(getattr(exponent, part))
                assert getattr(power, part) == pytest.approx(wanted, rel=1e-15)
        if name != "softmax":
            ratio = entry.perplexity.estimate / by_cell["softmax"].perplexity.estimate
            assert entry.perplexity_ratio.estimate == pytest.approx(ratio, rel=1e-12)


def test_a_check_tells_what_a_recipe_does_to_texts(run_check, texts_file, tmp_path):
    arguments = [f"--text={texts_file}", f"--text_length={LENGTH}", "--recipe=relu:p=4,b=-1000"]
    outcome = run_check(*arguments, f"--workdir={tmp_path / 'run'}")
    assert outcome.code == 10, outcome.err
    result = load_result(tmp_path / "run" / "summary.json", CheckResult)
    # Every row is dead, in 3 layers and 4 heads: none is active and all that softmax has is lost.
    assert result.texts.recipe.dead_rows_per_text == 3 * 4 * (LENGTH + 29 + LENGTH) / 3
    # Every row is dead, and no dead row is safe.
    assert result.texts.unsafe.recipe.estimate == result.texts.unsafe.dead.estimate == 1.0
    assert result.texts.against_softmax.lost_of_concentrated.estimate == 1.0
    (line,) = (line for line in outcome.out.splitlines() if line.startswith("  change on them"))
    assert line.split()[4] == f"{result.texts.recipe.change.estimate:+.3f}"


def test_the_diagnosis_has_the_rows_of_the_check_and_stops(run_check, texts_file, tmp_path):
    arguments = [f"--text={texts_file}", f"--text_length={LENGTH}", "--recipe=relu:p=3,b=0.5"]
    outcome = run_check(*arguments, "--diagnose", f"--workdir={tmp_path / 'run'}")
    assert outcome.code == 0, outcome.err
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert "summary.json" in names and "calibration.json" not in names
    result = load_result(tmp_path / "run" / "summary.json", DiagnosisResult)
    assert (result.texts, result.tokens, result.degree) == (3, 2 * LENGTH + 29, 3)
    rows = pq.read_table(tmp_path / "run" / "rows").to_pylist()
    assert {row["bias"] for row in rows} == {0.0, 0.5} and {r["target"] for r in rows} == {"argmax"}
    by_head = {(h.bias_kind, h.layer, h.head): h for h in result.heads}
    assert len(by_head) == 2 * 3 * 4
    for (kind, layer, number), head in by_head.items():
        own = [r for r in rows if (r["bias_kind"], r["layer"], r["head"]) == (kind, layer, number)]
        sharp = [r for r in own if r["s_softmax"] < 1]
        assert (head.rows, head.concentrated) == (3 * QUERIES, len(sharp))
        assert head.s_softmax == np.float32(np.median([r["s_softmax"] for r in own]))
        assert head.lost["3"] == sum(r["s_3"] >= 1 for r in sharp)
    lost = next(e for e in result.against_softmax if (e.bias_kind, e.p) == ("0.5", 3)).lost
    heads = [h for h in result.heads if h.bias_kind == "0.5"]
    rows_of_heads = sum(h.rows for h in heads)
    assert lost.estimate == pytest.approx(sum(h.lost["3"] for h in heads) / rows_of_heads)
    assert max(map(len, outcome.out.splitlines()[:-1])) <= 80
    again = run_check(*arguments, "--diagnose", f"--workdir={tmp_path / 'run'}")
    assert again.out.partition("\n")[2] == outcome.out
    refused = run_check("--diagnose")
    assert (refused.code, "name a file, --text=FILE" in refused.err[0]) == (2, True)
