"""The smoke mode of every audit config runs from end to end, here on the tiny model."""

import json
from pathlib import Path

import pytest

from lm_jax import launch
from lm_jax.errors import UsageError
from polyattn_jax.config import MODES, AuditConfig

ROOT = Path(__file__).parents[2]
CONFIGS = sorted(path.name for path in (ROOT / "configs" / "polyattn").glob("*.py"))


@pytest.mark.parametrize("name", CONFIGS)
def test_the_smoke_mode_ends_with_a_summary(run_smoke, tmp_path, name):
    outcome = run_smoke(name, tmp_path / "run")
    assert outcome.code == 0, outcome.err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [entry["recipe"] for entry in summary["verdicts"]] == ["relu_p4_bauto"]
    assert summary["rows"] == 3 * 4 * 2 * 2 * (2 + 2 + 2)


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
