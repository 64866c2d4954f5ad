"""The benchmark of the audit prints no ratio of results that disagree."""

import functools

import jax
import numpy as np
import pytest

import lm_jax
from polyattn_jax.audit import measure
from tools.bench import audit as bench_audit
from tools.bench.in_torch import scores as torch_scores


class Letters:
    """A tokenizer of one id per character."""

    def encode(self, text):
        return [ord(character) % 40 for character in text]


@pytest.fixture
def model(monkeypatch):
    monkeypatch.setattr(bench_audit, "PAUSE", 0.0)
    cfg = lm_jax.DecoderConfig(
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=4,
        hidden_size=8,
        mlp_size=8,
        vocab_size=40,
        max_length=64,
    )
    params = lm_jax.init_params(jax.random.key(0), cfg)
    return lm_jax.Pretrained(cfg, params, Letters(), ())


def test_the_diagnosing_forward_is_timed_once_it_agrees_with_float64(model, capsys):
    assert bench_audit.diagnosing(model, length=33, repeats=2)
    bench_audit.program_memory(model, length=33)
    out = capsys.readouterr().out
    assert "diagnosing / ordinary forward, 33 tokens; " in out and " ms (" in out
    assert "program memory, diagnosing / ordinary forward, 33 tokens: " in out


@pytest.mark.parametrize("factor", [1.01, np.nan])
def test_wrong_statistics_print_no_ratio(factor, model, capsys, monkeypatch):
    @functools.wraps(measure.diagnose)
    def wrong(*arguments, diagnose=measure.diagnose, **options):
        result = diagnose(*arguments, **options)
        stats = result.rows["argmax"]
        return result._replace(rows={"argmax": stats._replace(s_p=factor * stats.s_p)})

    monkeypatch.setattr(measure, "diagnose", wrong)
    assert not bench_audit.diagnosing(model, length=33, repeats=2)
    out = capsys.readouterr().out
    assert "not timed, as the error of S_p" in out and " ms (" not in out


@pytest.mark.torch
def test_wrong_logits_print_no_ratio(model, capsys, monkeypatch):
    monkeypatch.setattr(bench_audit, "LOGIT_TOLERANCE", 0.0)
    model = lm_jax.Pretrained(model.cfg, model.params, None, ())
    monkeypatch.setattr(bench_audit, "tokens", lambda model, length: jax.numpy.ones((1, 9), int))
    assert not bench_audit.against_torch(model, length=9, repeats=1)
    out = capsys.readouterr().out
    assert "not timed, as logits differ by" in out and " ms (" not in out


@pytest.mark.torch
def test_a_hooked_torch_model_gives_the_same_s_p(model, capsys):
    assert bench_audit.against_hooks(model, count=3, length=17, repeats=2)
    out = capsys.readouterr().out
    assert "S_p of 3 prompts of 17 tokens, diagnosing / transformers with a hook; " in out
    assert " ms (" in out


@pytest.mark.torch
def test_other_s_p_than_torch_prints_no_ratio(model, capsys, monkeypatch):
    text = torch_scores.ScoreRows.__call__
    monkeypatch.setattr(
        torch_scores.ScoreRows, "__call__", lambda self, tokens: (2 * text(self, tokens)[0], None)
    )
    assert not bench_audit.against_hooks(model, count=3, length=17, repeats=2)
    out = capsys.readouterr().out
    assert "not timed, as the target's mass differs by" in out and " ms (" not in out
