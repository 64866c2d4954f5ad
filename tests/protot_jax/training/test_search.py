"""The search proposes from its space, finds the optimum, and survives a kill at any time."""

import dataclasses
import importlib.util
import json
import math
import shlex
import sys
import types

import numpy as np
import pyarrow.parquet as pq
import pytest
from scipy import stats

from lm_jax.console import cli
from lm_jax.errors import CorruptError, DivergedError, StoppedError, UsageError
from lm_jax.run import stop
from lm_jax.run.files import read_json, write_json
from lm_jax.run.results import load_result
from lm_jax.run.tables import read_table_provenance
from lm_jax.run.workdir import CONFIG_FILE
from lm_jax.study import frame
from protot_jax.studies import search
from protot_jax.training import search_space
from protot_jax.training.config import PretrainConfig
from protot_jax.training.results import PretrainSummary, SearchSummary, Trial
from protot_jax.training.search_space import SearchConfig, propose

FULL = "configs/protot/search.py"
# Where `bowl` is lowest.
BEST_RATE, BEST_SIZE = 2e-3, 32


def decades(rate):
    """How far a learning rate is from the best."""
    return abs(math.log10(rate / BEST_RATE))


def bowl(config, folder):
    """Perplexities of three seeds: a parabola in the logarithm of the rate, and a batch size."""
    del folder
    value = 90 + 40 * decades(config.learning_rate) ** 2 + 5 * (config.batch_size != BEST_SIZE)
    return [value - 1, value, value + 1]


def searched(folder, measure=bowl, **changes):
    folder.mkdir(exist_ok=True)
    return search.run(SearchConfig(**{"sampler": "tpe", **changes}), folder, measure)


def log_position(rate):
    """Where a rate lies between 3e-5 and 3e-2, from 0 to 1, in its logarithm."""
    return math.log(rate / 3e-5) / math.log(1e3)


def test_random_trials_are_uniform_in_the_logarithm_of_the_rate_and_over_batch_sizes():
    drawn = [propose(SearchConfig(sampler="random", seed=seed), []) for seed in range(300)]
    rates = [each["learning_rate"] for each in drawn]
    assert min(rates) >= 3e-5 and max(rates) <= 3e-2
    assert stats.kstest([log_position(rate) for rate in rates], "uniform").pvalue > 0.05
    counts = [sum(each["batch_size"] == size for each in drawn) for size in (32, 64, 128)]
    assert sum(counts) == 300 and stats.chisquare(counts).pvalue > 0.05
    # The saved rate is exactly the one of the printed flag.
    assert all(rate == float(f"{rate:.3e}") for rate in rates)


def test_every_sampler_begins_with_the_same_random_trials(tmp_path):
    reports = {
        sampler: searched(tmp_path / sampler, sampler=sampler, trials=8, random_trials=6)
        for sampler in ("random", "tpe")
    }
    first, second = ([t.drawn for t in reports[s].trials] for s in ("random", "tpe"))
    assert first[:6] == second[:6]
    assert first[6:] != second[6:]
    assert len({each["learning_rate"] for each in first}) == 8
    other = searched(tmp_path / "seed", sampler="random", trials=8, seed=1)
    assert not {t.drawn["learning_rate"] for t in other.trials} & {
        each["learning_rate"] for each in first
    }


def test_the_sampler_comes_nearer_to_the_best_rate_than_chance(tmp_path):
    nearer = []
    for seed in range(5):
        report = searched(tmp_path / f"{seed}", trials=30, random_trials=10, seed=seed)
        distances = [decades(t.drawn["learning_rate"]) for t in report.trials]
        best = report.best.drawn
        assert decades(best["learning_rate"]) < 0.1 and best["batch_size"] == BEST_SIZE
        nearer.append(np.mean(distances[:10]) - np.mean(distances[10:]))
    # Drawn at random, a rate is 0.8 decades away.
    assert np.mean(nearer) > 0.3


class Killed(BaseException):
    """Stands for kill -9: nothing in the search handles it."""


@pytest.mark.parametrize("sampler", ["tpe", "random"])
def test_a_search_killed_at_every_trial_ends_as_one_that_was_not(tmp_path, sampler):
    asked = {"sampler": sampler, "trials": 9, "random_trials": 4}
    whole = searched(tmp_path / "whole", **asked)
    visited = set()

    def killed_first(config, folder):
        if folder.name in visited:
            return bowl(config, folder)
        visited.add(folder.name)
        # The second half is killed before the draw was on disk, in the midst of its writing.
        if len(visited) > 5:
            record = folder.with_suffix(".json")
            record.rename(record.with_name(f".{record.name}.tmp"))
        raise Killed

    starts = 0
    while not (tmp_path / "killed" / search.SUMMARY).exists():
        starts += 1
        try:
            searched(tmp_path / "killed", killed_first, **asked)
        except Killed:
            continue
    assert starts == 10
    killed, once = (tmp_path / name for name in ("killed", "whole"))
    assert (killed / search.SUMMARY).read_bytes() == (once / search.SUMMARY).read_bytes()
    # In their metadata the two differ: they were made at other times.
    assert pq.read_table(killed / search.ROWS).equals(pq.read_table(once / search.ROWS))
    # Nothing is measured again, and more trials continue from those on disk.
    assert searched(tmp_path / "killed", None, **asked) == whole
    longer = searched(tmp_path / "killed", **asked | {"trials": 12})
    assert longer.trials[:9] == whole.trials


def test_a_trial_that_diverges_is_recorded_and_the_sampler_keeps_away(tmp_path):
    def steep(config, folder):
        if config.learning_rate > 5e-3:
            raise DivergedError(f"step 3 has loss nan ({folder / 'seed_234'})")
        return [math.inf] if config.learning_rate < 5e-5 else bowl(config, folder)

    late = 0
    for seed in range(4):
        place = tmp_path / f"{seed}"
        trials = searched(place, steep, trials=40, random_trials=15, seed=seed).trials
        lost = [t.trial for t in trials if t.status == "diverged"]
        rates = [t.drawn["learning_rate"] for t in trials]
        assert lost == [k for k, rate in enumerate(rates) if not 5e-5 <= rate <= 5e-3]
        # The folder, which may be moved, is not named.
        assert {trials[k].reason for k in lost} <= {
            "step 3 has loss nan (seed_234)",
            "the mean validation perplexity is inf",
        }
        rows = pq.read_table(place / search.ROWS)
        assert rows.schema.equals(search.SCHEMA)
        assert "git" in read_table_provenance(place / search.ROWS)
        assert rows["perplexity"].null_count == rows["status"].to_pylist().count("diverged")
        late += sum(k >= 15 for k in lost)
    # Of 100 trials 33 would diverge at random; of a sampler without the failures, 73.
    assert late < 33


def test_a_search_in_which_all_diverge_is_an_error_that_leaves_its_report(tmp_path):
    def nan(config, folder):
        raise DivergedError("step 1 has loss nan")

    with pytest.raises(DivergedError, match=r"all 3 trials diverged, trial 0 with: step 1 has .*"):
        searched(tmp_path, nan, trials=3)
    report = load_result(tmp_path / search.SUMMARY, SearchSummary)
    assert report.best is None and report.flags is None
    assert [t.status for t in report.trials] == ["diverged"] * 3


def test_models_above_the_limit_of_flops_are_not_trained_and_count_for_nothing(tmp_path):
    folders = []

    def sized(config, folder):
        folders.append(folder.name)
        return [value - config.hidden_size / 100 for value in bowl(config, folder)]

    asked = {"choices": ("hidden_size=[64, 256]", "num_layers=[2,4]"), "trials": 12}
    small = {"hidden_size": 64, "num_layers": 4}
    limit = search.forward_flops(dataclasses.replace(PretrainConfig(), **small))
    report = searched(tmp_path, sized, random_trials=6, most_flops=float(limit), **asked)
    refused = [t for t in report.trials if t.status == "refused"]
    done = [t for t in report.trials if t.status == "done"]
    assert refused and {t.drawn["hidden_size"] for t in refused} == {256}
    assert len(done) == len(folders) == 12 and {t.drawn["hidden_size"] for t in done} == {64}
    assert max(t.flops for t in done) == limit < min(t.flops for t in refused)
    assert f"{len(refused)} were above the limit" in search.format_summary(report)
    choices = json.loads(pq.read_table(tmp_path / search.ROWS)["choices"][0].as_py())
    assert choices.keys() == {"hidden_size", "num_layers"}


def test_the_summary_lists_the_ten_best_trials_and_the_flags(tmp_path):
    report = searched(tmp_path, trials=12, random_trials=12)
    values = [t.perplexity for t in report.trials]
    assert report.best.perplexity == min(values)
    *lines, last = search.format_summary(report).splitlines()
    assert len(lines) == 3 + 10
    assert f"seeds {min(values) - 1:.2f} to {min(values) + 1:.2f}, n = 3)" in lines[3]
    rate, size = (report.best.drawn[name] for name in ("learning_rate", "batch_size"))
    assert last == f"best: --config.learning_rate={rate} --config.batch_size={size}"


def test_a_folder_of_another_search_is_refused(tmp_path):
    searched(tmp_path, trials=4)
    others = (
        {"learning_rate": (3e-5, 4e-5)},
        {"batch_sizes": (2,)},
        {"choices": ("dropout=[0.0, 0.1]",)},
        {"base": PretrainConfig(epochs=3)},
    )
    for other in others:
        with pytest.raises(UsageError, match=r"trials/000\.json is a trial of another search"):
            searched(tmp_path, **other)


def test_a_trial_without_the_fields_that_do_not_apply_is_read(tmp_path):
    """Searches once left such fields out; now they are null."""
    content = {"trial": 3, "status": "running", "drawn": {}, "flops": 1, "config_hash": "c"}
    write_json(tmp_path / "trial.json", content)
    assert load_result(tmp_path / "trial.json", Trial) == Trial(**content)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"status": "over"}, "status = 'over' is not one of the choices"),
        ({"status": "diverged"}, "trial 1 is diverged with perplexity"),
        ({"perplexity": None}, "trial 1 is done without perplexity"),
        ({"reason": "x"}, "trial 1 is done with reason"),
        (
            {"drawn": {"learning_rate": [1.0]}},
            r"drawn\.learning_rate = \[1\.0\]; give a truth value \(True or False\) or a ",
        ),
    ],
)
def test_a_damaged_trial_is_refused_with_its_path_and_the_remedy(tmp_path, change, message):
    searched(tmp_path, trials=2)
    file = tmp_path / search.TRIALS / "001.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(
        CorruptError, match=rf"trials/001\.json is no Trial: .*{message}.*"
    ) as error:
        searched(tmp_path, trials=2)
    assert "restore it, or start again in another --workdir" in str(error.value)


def test_a_stop_ends_the_search_between_trials(tmp_path, monkeypatch):
    monkeypatch.setattr(stop, "requested", lambda: True)
    with pytest.raises(StoppedError, match="before trial 0"):
        searched(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"learning_rate": (3e-2, 3e-5)},
            r"config\.learning_rate = .* must be rising from above 0",
        ),
        (
            {"learning_rate": (0.0, 1.0)},
            r"config\.learning_rate = .* must be rising from above 0",
        ),
        ({"batch_sizes": ()}, r"config\.batch_sizes = \(\) must be one or more different values"),
        ({"batch_sizes": (8, 8)}, r"config\.batch_sizes = \(8, 8\) must be one or more different"),
        ({"trials": 0, "seed": -1}, r"config\.trials = 0 must be at .*; config\.seed = -1 must"),
        ({"choices": ("dropout",)}, r"'dropout' is not field=\[value, \.\.\.\]"),
        ({"choices": ("dropout=0.1",)}, r"'dropout=0\.1' is not field="),
        ({"choices": ("dropout=[0.1,0.1]",)}, "different JSON values"),
        ({"choices": ("dropout=[0.1]", "dropout=[0.2]")}, "name each field once"),
        ({"choices": ("batch_size=[8]",)}, "batch_size is searched as it is"),
        ({"choices": ("corpus.vocab_size=[500]",)}, r"corpus\.vocab_size must be the same in all"),
        ({"choices": ("context=[64]",)}, "context must be the same in all trials"),
    ],
)
def test_what_cannot_be_searched_is_refused_with_the_remedy(changes, message):
    with pytest.raises(UsageError, match=message):
        SearchConfig(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_sizes": (32, 33)}, "batch of 33 does not divide"),
        ({"choices": ("hidden_sizes=[64]",)}, r"hidden_sizes is not a field .* 'hidden_size'"),
        ({"choices": ("dropout=[true]",)}, r"config\.dropout = True"),
        ({"choices": ('model=["x"]',)}, r"config\.model = 'x'"),
        (
            {"most_flops": 1e6},
            r"most_flops = 1e\+06 allows no model: the cheapest takes 4\.1\de\+09",
        ),
        ({"choices": (f"num_layers={list(range(1, 1002))}",)}, "make 1,001 combinations"),
    ],
)
def test_what_would_fail_later_is_refused_before_the_start(changes, message):
    with pytest.raises(UsageError, match=message):
        search.check(SearchConfig(**{"sampler": "tpe", **changes}))


def test_a_sampler_that_is_not_installed_is_named_before_any_work(tmp_path, monkeypatch, capsys):
    result = importlib.util.find_spec
    absent = {"botorch", "optuna_integration", "torch"}
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else result(name)
    )
    for name in (*absent, "optuna"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    argv = ["search", f"--config={FULL}", f"--workdir={tmp_path / 'run'}"]
    assert cli.run(search.main, argv, config=FULL) == UsageError.exit_code
    error = capsys.readouterr().err
    assert "lacks optuna_integration, botorch, torch; pip install" in error
    assert "or choose --config.sampler=tpe" in error and error.count("\n") == 1
    absent.add("optuna")
    for sampler, remedy in (
        ("tpe", "optuna is missing; pip install"),
        ("botorch", "lacks optuna,"),
    ):
        with pytest.raises(UsageError, match=remedy):
            search.check(SearchConfig(sampler=sampler))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("sampler", "absent", "message"),
    [
        (
            "botorch",
            ("optuna_integration", "botorch", "torch"),
            "lacks optuna_integration, botorch, torch; pip install .* or choose --config.sampler",
        ),
        ("tpe", ("optuna",), "optuna is missing; pip install"),
        ("botorch", ("optuna", "botorch"), "lacks optuna,"),
    ],
)
def test_a_sampler_that_is_not_installed_is_named(sampler, absent, message, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name in absent else find(name)
    )
    for name in absent:
        monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(UsageError, match=message):
        search.check(SearchConfig(sampler=sampler))


def test_the_paper_s_sampler_gets_a_seed_of_its_own_for_every_trial(tmp_path, monkeypatch):
    from optuna.samplers import RandomSampler

    samplers = []

    def sampler(*, seed, n_startup_trials):
        samplers.append((seed, n_startup_trials))
        return RandomSampler(seed=seed)

    module = types.SimpleNamespace(BoTorchSampler=sampler)
    monkeypatch.setattr(
        search_space.importlib, "import_module", {"optuna_integration.botorch": module}.get
    )
    searched(tmp_path, sampler="botorch", trials=5)
    seeds, starts = zip(*samplers, strict=True)
    assert len(set(seeds)) == 5 and all(0 <= seed < 2**31 for seed in seeds)
    assert set(starts) == {15}


# .ci/nightly has BoTorch beside torch, and .ci/run torch alone.
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.torch
# botorch builds on functions that torch has deprecated.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_the_paper_s_sampler_finds_the_best_rate_from_the_trials_on_disk():
    config = SearchConfig()
    search.check(config)
    before = []
    for number in range(18):
        drawn = propose(config, before)
        trial = dataclasses.replace(config.base, **drawn)
        value = np.mean(bowl(trial, None))
        before.append(Trial(number, "done", drawn, 1, "", value, (value,)))
        if number in (0, 16):
            # No state but the trials decides a draw, so that a killed search goes on with it.
            assert propose(config, before[:-1]) == drawn
    # After 15 random trials a Gaussian process; at random a rate is 0.8 decades away.
    for trial in before[15:]:
        assert decades(trial.drawn["learning_rate"]) < 0.2
        assert trial.drawn["batch_size"] == BEST_SIZE


@pytest.mark.slow
def test_the_smoke_mode_trains_resumes_and_hands_its_best_to_pretrain(text, tmp_path, capsys):
    place = tmp_path / "run"
    corpus = {"source": text, "unit": "document", "vocab_size": 60, "splits": "(0.7, 0.15, 0.15)"}
    argv = ["search", f"--config={FULL}:smoke", f"--workdir={place}"]
    argv += [f"--config.base.corpus.{name}={value}" for name, value in corpus.items()]
    assert cli.run(search.main, [*argv, "--profile=2:2"], config=FULL, training=True) == 0
    printed = capsys.readouterr().out
    report = load_result(place / search.SUMMARY, SearchSummary)
    assert len(report.trials) == 2 and f"best: {report.flags}" in printed
    for trial in report.trials:
        folder = place / "trials" / f"{trial.trial:03}"
        summary = load_result(folder / frame.SUMMARY, PretrainSummary)
        best = tuple(seed.best.validation_perplexity for seed in summary.seeds)
        assert trial.seed_perplexities == best and trial.perplexity == np.mean(best)
        assert (folder / "data").resolve() == place / "data"
        traces = list(folder.glob("seed_*/profile/plugins/profile/steps_2_2/scopes.json"))
        assert len(traces) == len(summary.seeds)
        # The tokenizer found fewer tokens than it was allowed.
        assert trial.flops >= summary.forward_flops_per_example
    # The printed flags, applied to the base config, give the config of the best trial.
    base = read_json(place / CONFIG_FILE)["base"]
    for flag in shlex.split(report.flags):
        name, _, value = flag.removeprefix("--config.").partition("=")
        base[name] = json.loads(value)
    best = place / "trials" / f"{report.best.trial:03}"
    assert read_json(best / CONFIG_FILE) == base
    # The same command finds it finished, and trains nothing.
    before = {path: path.stat().st_mtime_ns for path in (place / "trials").rglob("*.parquet")}
    written = (place / search.SUMMARY).read_bytes()
    assert cli.run(search.main, argv, config=FULL) == 0
    assert (place / search.SUMMARY).read_bytes() == written
    assert before == {
        path: path.stat().st_mtime_ns for path in (place / "trials").rglob("*.parquet")
    }
