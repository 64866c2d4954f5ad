"""Every Pallas kernel lowers for an H200 at the sizes of its budgets, with jaxlib alone."""

import functools
import re

from jax.experimental import pallas as pl
import pytest

from tools.gpu_code import budgets, target


@pytest.mark.parametrize(
    ("suite", "case"),
    budgets.workloads(*budgets.operations("pallas")),
    ids=lambda each: getattr(each, "op", getattr(each, "name", "")),
)
def test_value_and_gradients_lower_to_triton(suite, case, monkeypatch, capsys):
    """And no number is lowered as a flag: of `jnp.where(flag, 1, 64)` on scalars a bit is left."""
    monkeypatch.setattr(pl, "pallas_call", functools.partial(pl.pallas_call, debug=True))
    lowered = target.lower(*budgets.program(suite, case))
    assert "__gpu$xla.gpu.triton" in lowered.as_text()
    modules = capsys.readouterr().out
    assert "tt.func public" in modules and "arith.select" in modules
    assert re.search(r"arith\.select [^:]*: i1\b", modules) is None


@pytest.mark.parametrize("op", budgets.operations())
def test_every_operation_with_a_kernel_has_cases_with_a_budget_each_of_its_own_name(op):
    names = [case.name for _, case in budgets.workloads(op)]
    assert names and len(set(names)) == len(names)
