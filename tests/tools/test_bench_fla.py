"""Our arguments of flash-linear-attention give the prefix mean, by its recurrence in numpy."""

import jax
import numpy as np
import pytest

from iaj_kernels.core import cases
from iaj_kernels.prefix_mean.cases import SUITE
from tools.bench import baseline_fla, baselines


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
    got = gated_linear_attention(*baseline_fla.gla_arguments(np, hgrn, *arguments))
    assert cases.relative_error(got, want) < 1e-5


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setattr(baseline_fla.importlib.util, "find_spec", lambda name: None)
    assert baselines.OUTSIDE["fla"].missing() == (
        "torch and fla not installed; pip install torch flash-linear-attention"
    )
    monkeypatch.setattr(baseline_fla.importlib.util, "find_spec", lambda name: name)
    assert baselines.OUTSIDE["fla"].missing() == ""
