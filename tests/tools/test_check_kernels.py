"""`tools.check_kernels` on a toy operation: green, red and unsupported cases."""

import dataclasses
import json

import jax
import pytest

from iaj_kernels.core import cases, dispatch
from tools import check_kernels


def toy(error: float = 0.0) -> cases.Suite:
    """Squares; "fast" is off by `error` of them, and does not serve a case of width 5."""

    def call(case, arrays, implementation):
        if implementation == "fast" and case.sizes["N"] == 5:
            raise dispatch.UnavailableError("toy: implementation='fast' has no width 5")
        slip = error if implementation == "fast" else 0.0
        return {"out": arrays["x"] ** 2 * (1.0 + slip)}

    return cases.Suite(
        op="toy",
        cases=tuple(cases.Case(f"n{N}", {"B": 2, "N": N}) for N in (4, 5)),
        make=lambda case, key: {"x": jax.random.normal(key, tuple(case.sizes.values()))},
        call=call,
        differentiable=("x",),
        implementations=("fast", "reference"),
    )


@pytest.fixture
def checked(monkeypatch, capsys):
    def run(suite, *arguments):
        monkeypatch.setattr(check_kernels, "SUITES", {"toy": suite})
        code = check_kernels.main(list(arguments))
        return code, capsys.readouterr().out

    return run


def test_a_case_within_its_bounds_is_green_and_an_unsupported_one_is_named(checked, tmp_path):
    file = tmp_path / "rows.json"
    code, out = checked(toy(), "--implementation=fast", f"--json={file}")
    assert code == 0 and "green toy n4: worst" in out and "1 cases, 0 red" in out
    assert "toy: implementation='fast' has no width 5: n5" in out
    (row,) = json.loads(file.read_text())["rows"]
    assert row["green"] and row["repeats_itself"] and set(row["deviations"]) == {"out", "d_x"}
    assert max(share for _, share in row["deviations"].values()) <= 1


def test_an_error_beyond_rounding_is_red_and_fails(checked):
    code, out = checked(toy(error=1e-3), "--implementation=fast")
    assert code == 1 and "RED   toy n4" in out and "1 cases, 1 red" in out


def test_an_operation_of_which_no_case_is_supported_fails(checked):
    suite = dataclasses.replace(toy(), cases=toy().cases[1:])
    code, out = checked(suite, "--implementation=fast", "--op=toy")
    assert code == 1 and "0 cases, 0 red" in out
    # In a part of the cases there may be none.
    assert checked(toy(), "--implementation=fast", "--shard=1/2")[0] == 0


def test_kernels_without_a_gpu_are_refused_with_the_remedy(capsys):
    with pytest.raises(SystemExit) as caught:
        check_kernels.main([])
    assert caught.value.code == 2
    assert "needs an NVIDIA GPU and this is cpu; pass --interpret" in capsys.readouterr().err
