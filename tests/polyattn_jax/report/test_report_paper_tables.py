"""The page repeats the paper's own sweeps as printed."""

import dataclasses

import pytest

from tests.polyattn_jax.report.test_report import audit, build, lines, parsed, text_of

MODELS = ["Llama-3.2-1B", "Qwen3-1.7B", "Gemma-4-E2B", "Pythia-1.4b"]
# Table 2, row by row.
LITERARY = """
relu_p2_b0       -52.5 -79.0 -70.5 -70.5
relu_p2_bauto    -44.5 -71.5 -74.0 -65.0
relu_p4_b0       -54.5 -73.0 -27.0 -69.0
relu_p4_bauto    -21.0 -61.5 -50.0 -65.0
relu_p8_b0       -67.0 -60.5 -17.5 -65.5
relu_p8_bauto    -25.0 -59.0  -5.0 -65.0
relu_p16_b0      -69.0 -14.5 -45.0 -77.5
relu_p16_bauto   -52.0 -43.5 -28.5 -77.5
sigmoid_b0       -57.5 -79.0 -72.5 -65.0
sigmoid_bauto    -68.0 -79.0 -77.0 -65.0
relu_p1_over_L   -64.5 -79.0 -74.0 -77.5
relu_p2_over_L   -64.0 -79.0 -72.0 -77.5
relu_p1_over_sqrtL -74.5 -79.0 -73.5 -77.5
relu_p2_over_sqrtL -74.5 -79.0 -71.0 -77.5
"""


@pytest.mark.parametrize(
    "changes",
    [{}, {"family": "gpt2"}, {"model": "models/Llama-3.2-1B"}],
    ids=["near", "another architecture", "of the paper"],
)
def test_the_literary_sweep_is_the_paper_s_and_is_compared_with_none_of_ours(changes):
    result, rows, by_head = audit()
    tree = parsed(build(dataclasses.replace(result, **changes), rows, by_head))
    caption = "The paper's Table 2"
    expected = [row.replace("-", "−").split() for row in LITERARY.strip().splitlines()]
    assert lines(tree, caption) == expected
    (figure,) = (
        figure
        for figure in tree.iter("figure")
        if text_of(figure.find("figcaption")).startswith(caption)
    )
    assert [text_of(cell) for cell in figure.find(".//thead/tr")] == ["Recipe", *MODELS]
    assert "This audit has no such probe." in text_of(figure)
    differences = {row[0]: row[1] for row in lines(tree, "This audit and")}
    assert differences["Literary probe"] == "left out"
