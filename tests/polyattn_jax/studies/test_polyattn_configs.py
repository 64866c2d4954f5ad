"""The smoke mode of every audit config runs from end to end, on a toy of its own model's family.

GPT-2, which has no config of its own, is audited by that of SmolLM2. The configs of the paper's
models ask each suite at the lengths that the paper does.
"""

import dataclasses
import functools
import json
from pathlib import Path
import re

import numpy as np
import pyarrow.parquet as pq
import pytest

from lm_jax.console.config_files import load_config
from lm_jax.run.config import from_plain
from polyattn_jax.audit.audited_model import load
from polyattn_jax.audit.config import MODES, AuditConfig
from polyattn_jax.recipes.diagnostic import Status
from polyattn_jax.report import paper
from polyattn_jax.studies.paper.settings import PaperConfig
from tests.polyattn_jax import audit_oracle

# Run by `make test-all`.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
# Of audits; their own tests run the others, and the default is that of SmolLM2.
OTHERS = ("audit.py", "check.py", "paper.py", "distill.py", "rankings.py", "bench.py")
CONFIGS = sorted(
    path.name for path in (ROOT / "configs" / "polyattn").glob("*.py") if path.name not in OTHERS
)
SUITES = ("niah_64", "induction", "mqar")
# Family, dtype, and the windows of the layers, of which each has 4 heads, or 2 in Gemma 4's six.
TOYS = {
    "gemma3_270m.py": ("gemma3_text", "float32", {0: 4, 1: 0, 2: 4}),
    "gemma4_e2b.py": ("gemma4_text", "bfloat16", {0: 4, 1: 4, 2: 0, 3: 4, 4: 4, 5: 0}),
    "gpt2": ("gpt2", "float32", {0: 0, 1: 0, 2: 0}),
    "llama32_1b.py": ("llama", "bfloat16", {0: 0, 1: 0, 2: 0}),
    "pythia_1_4b.py": ("gpt_neox", "bfloat16", {0: 0, 1: 0, 2: 0}),
    # Its golden model has a window in the middle layer.
    "qwen3_1_7b.py": ("qwen3", "bfloat16", {0: 0, 1: 4, 2: 0}),
    "smollm2.py": ("llama", "float32", {0: 0, 1: 0, 2: 0}),
}


@pytest.fixture(scope="module")
def finished(run_smoke, toy, tmp_path_factory):
    """`finished(name)`: the folder of the smoke mode on a toy, which runs once."""

    @functools.cache
    def finished(name):
        folder = tmp_path_factory.mktemp("smoke") / "run"
        config = name if name in CONFIGS else "smollm2.py"
        outcome = run_smoke(config, toy(name), folder)
        assert outcome.code == 0, outcome.err
        return folder

    return finished


# Windows, and a family without a config; what the others have beside, nightly tests see.
UNLIKE = ("gemma3_270m.py", "gpt2")


@pytest.mark.parametrize(
    "name", [n if n in UNLIKE else pytest.param(n, marks=pytest.mark.slow) for n in TOYS]
)
def test_the_smoke_mode_ends_with_a_summary_of_its_own_family(finished, name):
    folder = finished(name)
    summary = json.loads((folder / "summary.json").read_text())
    assert [entry["recipe"] for entry in summary["verdicts"]] == ["relu_p4_bauto"]
    assert summary["rows"] == 3 * 4 * 2 * 2 * (2 + 2 + 2)
    family, dtype, windows = TOYS[name]
    assert (summary["family"], summary["config"]["dtype"]) == (family, dtype)
    rows = pq.read_table(folder / "rows.parquet").to_pylist()
    kinds = {"window" if window else "full" for window in windows.values()}
    for entry in summary["prevalence"]:
        assert set(entry["by_window"]) == (kinds if len(kinds) == 2 else set())
        for kind, rates in entry["by_window"].items():
            own = [
                # A dead row writes zeros, and is not safe.
                row["status"] == Status.DEAD or row["s_4"] >= 1
                for row in rows
                if (row["suite"], row["bias_kind"]) == (entry["suite"], entry["bias_kind"])
                and row["target"] == "argmax"
                and row["status"] in (Status.ACTIVE, Status.DEAD)
                and bool(row["window"]) == (kind == "window")
            ]
            assert rates["4"]["estimate"] == pytest.approx(np.mean(own))
    page = (folder / "report.html").read_text("utf-8")
    assert ("Unsafe rows of layers with a sliding window" in page) == (len(kinds) == 2)
    seconds = re.findall(r"batches in ([0-9.]+) s", (folder / "log.txt").read_text("utf-8"))
    assert seconds and max(map(float, seconds)) < 600
    assert {row["layer"]: row["window"] for row in rows} == windows
    for row in rows:
        # A query sees the keys of its window, itself among them, and no other.
        visible = min(row["query"] + 1, row["window"] or row["query"] + 1)
        assert 0 <= row["active"] < visible
        assert row["query"] - row["argmax"] < visible
        assert 0 <= row["distance"] < visible


def test_the_rows_of_a_gpt_2_equal_a_float64_oracle(finished, toy, haystack):
    """Learned positions, biases and LayerNorm are in the scores that are diagnosed."""
    smoke = from_plain(load_config(f"{ROOT}/configs/polyattn/smollm2.py:smoke"), AuditConfig)
    changed = dataclasses.replace(smoke, model=str(toy("gpt2")), haystack=str(haystack))
    audited = load(changed)
    cfg = audited.model.cfg
    assert (cfg.rope, cfg.norm, cfg.qkv_bias) == (None, "layer", True)
    expected = {suite: audit_oracle.rows_of(audited, suite) for suite in SUITES}
    rows = pq.read_table(finished("gpt2") / "rows.parquet").to_pylist()
    assert {row["suite"] for row in rows} == {*SUITES}
    for row in rows:
        place = row["prompt"], row["layer"], row["head"]
        audit_oracle.assert_row(row, expected[row["suite"]][place])


# The paper's models, and how many recipes each is asked under: its 14 and relu^4 at 6 biases, or
# none where the paper has rows alone.
PAPER = {
    "gemma4_e2b.py": ("Gemma-4-E2B", 20),
    "llama32_1b.py": ("Llama-3.2-1B", 20),
    "llama32_3b.py": ("Llama-3.2-3B", 20),
    "llama3_8b.py": ("Llama-3-8B", 20),
    "pythia_1_4b.py": ("Pythia-1.4b", 20),
    "qwen3_1_7b.py": ("Qwen3-1.7B", 20),
    "qwen3_8b.py": ("Qwen3-8B", 0),
}


def read(name, mode="", cls=AuditConfig):
    spec = str(ROOT / "configs" / "polyattn" / name) + (f":{mode}" if mode else "")
    return from_plain(load_config(spec), cls)


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_is_an_audit_of_the_14_recipes_or_fewer(name, mode):
    config = read(name, mode)
    whole = PAPER[name][1] if name in PAPER else 14
    assert len(config.recipes) == {"smoke": 1, "quickstart": 4}.get(mode, whole)
    assert (config.niah_n == 200) == (mode == "")
    # The suites of the paper's lengths are of the whole audit alone.
    assert not (mode and config.asked_suites)


def test_each_of_the_seven_models_has_a_config():
    assert sorted(name for name, _ in PAPER.values()) == sorted(m.name for m in paper.ALL_MODELS)
    assert {*PAPER} <= {*CONFIGS}


@pytest.mark.parametrize("name", PAPER)
def test_each_model_is_asked_what_the_paper_asks_it_at_its_lengths(name):
    model, config = PAPER[name][0], read(name)
    asked = [("niah", length) for length in config.niah_lengths]
    asked += [("induction", config.induction_length)] * (config.induction_n > 0)
    asked += [("mqar", config.mqar_length)] * (config.mqar_n > 0)
    own = {
        (one.suite, n) for one in paper.NUMBERS.asked if model in one.models for n in one.lengths
    }
    # Induction at its own length is diagnosed; as a named suite it is answered too.
    named = [one for one in config.asked_suites if one not in asked[-2:]]
    assert len({*asked, *named}) == len(asked) + len(named)
    # The needles of the sweep are the control of every audit.
    assert {*asked, *named} - own <= {("niah", paper.SETTINGS.needle_length)}
    assert own <= {*asked, *named}
    assert config.sweep_length == config.niah_lengths[0] == paper.SETTINGS.needle_length
    assert config.calibrated_at == paper.SETTINGS.calibration_length
    counts = {config.niah_n, config.suite_n, config.ablation_n} | {
        n for n in (config.induction_n, config.mqar_n) if n
    }
    assert counts == {paper.SETTINGS.prompts} and config.dtype == "bfloat16"
    # The head sets are tried where the paper tries them.
    shown = next(one for one in paper.ALL_MODELS if one.name == model)
    ablated = bool(shown.literary or shown.literary_draws)
    assert bool(config.ablation_heads) == ablated
    wanted = (("copying", paper.SETTINGS.literary_length),) * ablated
    assert config.ablated_suites == wanted
    assert paper.match(config.model) is shown


@pytest.mark.parametrize("name", PAPER)
def test_the_file_of_a_model_is_one_of_the_paper_s_tables_too(name):
    config = read(name, cls=PaperConfig)
    assert (config.asked, config.names) == ((config.model,), [config.model.split("/")[-1]])
    audited = config.audit(config.model)
    shared = {field.name for field in dataclasses.fields(AuditConfig)}
    assert all(getattr(audited, field) == getattr(read(name), field) for field in shared)


def test_only_pythia_is_asked_beyond_the_tokens_that_it_was_trained_on():
    assert {name for name in PAPER if read(name).context} == {"pythia_1_4b.py"}
    config = read("pythia_1_4b.py")
    lengths = [length for _, length in config.asked_suites]
    assert max(*lengths, config.induction_length, config.mqar_length) == config.context == 4096
