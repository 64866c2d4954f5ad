"""Our arguments of other libraries give our operations, by their recurrences in numpy."""

import types

import jax
import numpy as np
import pytest

from iaj_kernels.core import cases
from iaj_kernels.prefix_mean.cases import SUITE
from iaj_kernels.suites import SUITES
from tools.bench import baselines
from tools.bench.in_torch import libraries


def hgrn(x_BTD, g_BTD):
    """h_t = exp(g_t) h_{t-1} + x_t."""
    h_BD, result = np.zeros_like(x_BTD[:, 0]), []
    for t in range(x_BTD.shape[1]):
        h_BD = np.exp(g_BTD[:, t]) * h_BD + x_BTD[:, t]
        result.append(h_BD)
    return np.stack(result, 1)


def gated_linear_attention(q_BTK, k_BTK, v_BTE, g_BTK):
    """S_t = diag(exp g_t) S_{t-1} + k_t v_t^T, o_t = q_t S_t."""
    S_BKE, result = np.zeros((*k_BTK[:, 0].shape, v_BTE.shape[-1])), []
    for t in range(k_BTK.shape[1]):
        added = k_BTK[:, t, :, None] * v_BTE[:, t, None, :]
        S_BKE = np.exp(g_BTK[:, t, :, None]) * S_BKE + added
        result.append(np.einsum("BK,BKE->BE", q_BTK[:, t], S_BKE))
    return np.stack(result, 1)


@pytest.mark.parametrize("T", [1, 2, 65])
@pytest.mark.parametrize("gates", ["softmax", "one_hot"])
def test_gated_linear_attention_of_these_arguments_is_the_prefix_mean(T, gates):
    case = cases.Case("mapped", {"B": 2, "T": T, "R": 16, "E": 8}, options={"gates": gates})
    arrays = SUITE.make(case, jax.random.key(1))
    want = np.asarray(SUITE.call(case, arrays, "reference")["out"])
    arguments = (
        np.asarray(arrays[name], np.float64) for name in ("write", "value", "decay", "read")
    )
    got = gated_linear_attention(*libraries.gla_arguments(np, hgrn, *arguments))
    assert cases.relative_error(got, want) < 1e-5


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: None)
    assert baselines.OUTSIDE["fla"].missing() == (
        "torch and fla not installed; pip install torch flash-linear-attention"
    )
    monkeypatch.setattr(libraries.importlib.util, "find_spec", lambda name: name)
    assert baselines.OUTSIDE["fla"].missing() == ""
    assert baselines.OUTSIDE["mamba_ssm"].missing() == ""


def delta_rule(q, k, v, beta, g=None):
    """The recurrence of `iaj_kernels.delta_rule`, with its scale; and the last memory."""
    S, result = np.zeros((*k[:, 0].shape, v.shape[-1])), []
    for t in range(k.shape[1]):
        S = S if g is None else np.exp(g[:, t, :, None, None]) * S
        change = beta[:, t, :, None] * (v[:, t] - np.einsum("BNK,BNKE->BNE", k[:, t], S))
        S = S + k[:, t, :, :, None] * change[:, :, None]
        result.append(np.einsum("BNK,BNKE->BNE", q[:, t], S) / k.shape[-1] ** 0.5)
    return np.stack(result, 1), S


def scan(u, delta, A, B, C, D=None):
    """h_t = exp(delta_t A) h_{t-1} + delta_t B_t u_t, y_t = C_t h_t + D u_t; steps are last."""
    h, result = np.zeros((*u.shape[:2], A.shape[1])), []
    for t in range(u.shape[-1]):
        step = delta[:, :, t, None]
        h = np.exp(step * A) * h + step * B[:, None, :, t] * u[:, :, t, None]
        result.append((C[:, None, :, t] * h).sum(-1))
    return np.stack(result, -1) + (0 if D is None else D[:, None] * u)


@pytest.mark.parametrize(
    ("library", "op", "options"),
    [
        (libraries.FLA, "delta_rule", {}),
        (libraries.FLA, "delta_rule", {"decay": 0.3}),
        (libraries.MAMBA, "selective_scan", {}),
        (libraries.MAMBA, "selective_scan", {"skip": False}),
    ],
)
def test_functions_of_libraries_of_our_arrays_give_our_operations(
    library, op, options, monkeypatch
):
    def gated(q, k, v, g, beta):
        return delta_rule(q, k, v, beta, g)

    modules = {
        "fla.ops.delta_rule": types.SimpleNamespace(chunk_delta_rule=delta_rule),
        "fla.ops.gated_delta_rule": types.SimpleNamespace(chunk_gated_delta_rule=gated),
        "mamba_ssm.ops.selective_scan_interface": types.SimpleNamespace(selective_scan_fn=scan),
    }
    monkeypatch.setattr(libraries.importlib, "import_module", modules.__getitem__)
    suite, operation = SUITES[op], library.operations[op]
    sizes = {"B": 2, "T": 20, "N": 2, "H": 6, "E": 5, "I": 7, "J": 3}
    case = cases.Case("mapped", sizes, options=options)
    arrays = suite.make(case, jax.random.key(1))
    want = np.asarray(suite.call(case, arrays, "reference")[operation.result])
    # Every array of the operation is read.
    assert {*operation.arrays} >= {*arrays}
    given = {name: np.asarray(x, np.float64) for name, x in arrays.items()}
    assert cases.relative_error(operation.output(np, given), want) < 1e-5
