"""The smoke mode of every audit config runs from end to end, on a toy of its own model's family.

GPT-2, which has no config of its own, is audited by that of SmolLM2.
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
from tests.polyattn_jax import audit_oracle

# Run by `make test-all`.
pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[3]
# Of audits; their own tests run the others, and the default is that of SmolLM2.
OTHERS = ("audit.py", "check.py", "paper.py", "distill.py")
CONFIGS = sorted(
    path.name for path in (ROOT / "configs" / "polyattn").glob("*.py") if path.name not in OTHERS
)
SUITES = ("niah_64", "induction", "mqar")
# Family, dtype, and the windows of the layers, of which each has 4 heads, or 2 in Gemma 4's six.
TOYS = {
    "gemma3_270m.py": ("gemma3_text", "float32", {0: 4, 1: 0, 2: 4}),
    "gemma4": ("gemma4_text", "float32", {0: 4, 1: 4, 2: 0, 3: 4, 4: 4, 5: 0}),
    "gpt2": ("gpt2", "float32", {0: 0, 1: 0, 2: 0}),
    "llama32_1b.py": ("llama", "bfloat16", {0: 0, 1: 0, 2: 0}),
    "pythia_1_4b.py": ("gpt_neox", "bfloat16", {0: 0, 1: 0, 2: 0}),
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


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_is_an_audit_of_the_14_recipes_or_fewer(name, mode):
    spec = str(ROOT / "configs" / "polyattn" / name) + (f":{mode}" if mode else "")
    config = from_plain(load_config(spec), AuditConfig)
    assert len(config.recipes) == {"smoke": 1, "quickstart": 4}.get(mode, 14)
    assert (config.niah_n == 200) == (mode == "")
