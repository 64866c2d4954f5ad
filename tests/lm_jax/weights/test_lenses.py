"""Files of lenses: what was fitted is what is read; a pickle never is."""

import numpy as np
import pytest
from safetensors.numpy import save_file

from lm_jax.errors import BadInputError, CorruptError, UsageError
from lm_jax.inspect.jacobian_lens import JacobianLens
from lm_jax.weights.lenses import load_lens, load_tuned, save_lens


def test_a_file_is_read_as_it_was_written(tmp_path):
    matrix_SDD = np.random.default_rng(0).normal(size=(2, 5, 5)).astype(np.float32)
    lens = JacobianLens(matrix_SDD, 3, 40, 2, 16, np.array([0.1, np.nan]), "tiny")
    save_lens(tmp_path / "lens.safetensors", lens)
    again = load_lens(tmp_path / "lens.safetensors")
    np.testing.assert_allclose(again.matrix_SDD, lens.matrix_SDD, rtol=2.0**-10, atol=1e-6)
    for name in ("layers", "prompts", "rows", "skipped", "model"):
        assert getattr(again, name) == getattr(lens, name)
    np.testing.assert_allclose(again.spread_S, lens.spread_S)


@pytest.mark.parametrize(
    ("tensors", "error", "said"),
    [
        ({"J_0": np.eye(4), "J_2": np.eye(4)}, BadInputError, "holds J_0, J_2, and a lens has J_0"),
        ({"J_0": np.ones((4, 3))}, CorruptError, r"J_0 is of shape \(4, 3\)"),
        ({"J_0": np.full((4, 4), np.nan)}, CorruptError, "or not finite"),
    ],
)
def test_files_that_are_no_lens_are_named(tmp_path, tensors, error, said):
    save_file(tensors, tmp_path / "lens.safetensors")
    with pytest.raises(error, match=said):
        load_lens(tmp_path / "lens.safetensors")


def test_a_pickle_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "lens.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(BadInputError, match="a pickle, which is never opened here: convert it"):
        load_lens(tmp_path / "lens.pt")


def test_a_published_lens_is_read_after_its_conversion(tmp_path):
    """As the docstring of `load_lens` writes one: matrices, and a few numbers in the metadata."""
    tensors = {f"J_{layer}": np.eye(4, dtype=np.float16) * (layer + 1) for layer in range(3)}
    about = {"n_prompts": "1000", "source_layers": "[0, 1, 2]", "d_model": "4"}
    save_file(tensors, tmp_path / "lens.safetensors", metadata=about)
    lens = load_lens(tmp_path / "lens.safetensors")
    assert (lens.layers, lens.prompts, lens.skipped) == (4, 1000, 16)
    np.testing.assert_array_equal(lens.matrix_SDD[2], 3 * np.eye(4))
    assert np.isnan(lens.spread_S).all()


def tuned(layers, width):
    """A tuned lens as its tensors are stored."""
    rng = np.random.default_rng(0)
    shapes = {"weight": (width, width), "bias": (width,)}
    return {
        f"{layer}.{part}": rng.normal(size=shape).astype(np.float32)
        for layer in range(layers)
        for part, shape in shapes.items()
    }


def test_the_output_of_a_block_is_read_by_the_map_of_the_next_blocks_input(tmp_path):
    tensors = tuned(3, 4)
    save_file(tensors, tmp_path / "tuned.safetensors")
    lens = load_tuned(tmp_path / "tuned.safetensors")
    h_2D = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)
    for layer in (0, 1):
        weight, bias = (tensors[f"{layer + 1}.{part}"] for part in ("weight", "bias"))
        want = h_2D + h_2D @ weight.T + bias
        np.testing.assert_allclose(lens.transport(h_2D, layer), want, rtol=1e-6, atol=1e-6)
    # The last norm reads the last block's output as it is.
    np.testing.assert_array_equal(lens.transport(h_2D, 2), h_2D)
    for h, layer, said in ((h_2D, 3, "has no layer 3"), (h_2D[:, :3], 0, "the stream has 3")):
        with pytest.raises(UsageError, match=said):
            lens.transport(h, layer)


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda x: x.pop("1.bias"), BadInputError, "a tuned lens has 0.weight, 0.bias"),
        (lambda x: x.update({"0.weight": np.ones((4, 3))}), CorruptError, "0.weight is of shape"),
        (lambda x: x.update({"0.bias": np.full(4, np.inf)}), CorruptError, "or not finite"),
        (lambda x: x.update({"0.bias": np.array(1.0)}), CorruptError, "is of shape"),
    ],
)
def test_files_that_are_no_tuned_lens_are_named(tmp_path, change, error, said):
    tensors = tuned(2, 4)
    change(tensors)
    save_file(tensors, tmp_path / "tuned.safetensors")
    with pytest.raises(error, match=said):
        load_tuned(tmp_path / "tuned.safetensors")


def test_a_pickle_of_a_tuned_lens_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "params.pt").write_bytes(b"\x80\x02}q\x00.")
    with pytest.raises(BadInputError, match=r"convert it as lm_jax\.weights\.lenses\.load_tuned"):
        load_tuned(tmp_path / "params.pt")
