"""The smoke mode of every audit config runs from end to end, on a toy of its own model's family."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from lm_jax import launch
from lm_jax.errors import UsageError
from polyattn_jax.config import MODES, AuditConfig

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "configs" / "polyattn").glob("*.py"))
# Family, dtype, and the windows of the three layers.
TOYS = {
    "gemma3_270m.py": ("gemma3_text", "float32", {0: 4, 1: 0, 2: 4}),
    "llama32_1b.py": ("llama", "bfloat16", {0: 0, 1: 0, 2: 0}),
    "pythia_1_4b.py": ("gpt_neox", "bfloat16", {0: 0, 1: 0, 2: 0}),
    "smollm2.py": ("llama", "float32", {0: 0, 1: 0, 2: 0}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_the_smoke_mode_ends_with_a_summary_of_its_own_family(run_smoke, toys, tmp_path, name):
    outcome = run_smoke(name, toys[name], tmp_path / "run")
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [entry["recipe"] for entry in summary["verdicts"]] == ["relu_p4_bauto"]
    assert summary["rows"] == 3 * 4 * 2 * 2 * (2 + 2 + 2)
    family, dtype, windows = TOYS[name]
    assert (summary["family"], summary["config"]["dtype"]) == (family, dtype)
    rows = pq.read_table(tmp_path / "run" / "rows.parquet").to_pylist()
    assert {row["layer"]: row["window"] for row in rows} == windows
    for row in rows:
        # A query sees the keys of its window, itself among them, and no other.
        seen = min(row["query"] + 1, row["window"] or row["query"] + 1)
        assert 0 <= row["active"] < seen
        assert row["query"] - row["argmax"] < seen
        assert 0 <= row["distance"] < seen


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("mode", sorted(MODES))
def test_every_mode_is_an_audit_of_the_14_recipes_or_fewer(name, mode):
    spec = str(ROOT / "configs" / "polyattn" / name) + (f":{mode}" if mode else "")
    config = launch.freeze(launch.load_config(spec), AuditConfig)
    assert len(config.recipes) == (1 if mode == "smoke" else 14)
    assert (config.niah_n == 200) == (mode == "")


def test_an_unknown_mode_is_refused():
    with pytest.raises(UsageError, match="mode 'smoked' is not one of an audit; did you mean 'smo"):
        launch.load_config(f"{ROOT}/configs/polyattn/smollm2.py:smoked")
