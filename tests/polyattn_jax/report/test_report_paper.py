"""Our numbers and the paper's: judged where model, lengths and prompts agree, else why not."""

import dataclasses

import pytest

from tests.polyattn_jax.synthetic_report import build, lines, parsed, text_of


def like_the_paper(result, **changes):
    """A summary with the paper's model, lengths and numbers of prompts, but for `changes`."""
    lengths = {"induction_length": 4096, "mqar_length": 4096, "sweep_length": 1536}
    settings = lengths | {"induction_n": 200, "calibration_length": 1024, "dtype": "bfloat16"}
    settings |= changes
    length = settings["sweep_length"]
    accuracy = result.controls.accuracy
    return dataclasses.replace(
        result,
        model="models/Llama-3.2-1B",
        layers=16,
        heads=32,
        config=dataclasses.replace(result.config, niah_lengths=(length, 1024), **settings),
        calibration=dataclasses.replace(result.calibration, length=settings["calibration_length"]),
        controls=dataclasses.replace(
            result.controls, accuracy=accuracy | {f"niah_{length}": accuracy["niah_64"]}
        ),
        sweep=tuple(
            dataclasses.replace(entry, accuracy=dataclasses.replace(entry.accuracy, n=200))
            for entry in result.sweep
        ),
        prevalence=tuple(dataclasses.replace(entry, prompts=200) for entry in result.prevalence),
    )


def judged(tree, caption):
    """By the first column: the second, and the last."""
    return {row[0]: (row[1], row[-1]) for row in lines(tree, caption)}


def test_a_model_of_the_paper_is_judged_where_length_and_prompts_agree(finding):
    result, rows, by_head = finding
    tree = parsed(build(like_the_paper(result), rows, by_head))
    needle = {row[0]: row[1] for row in lines(tree, "Needle probe, ours")}
    assert needle["relu_p4_bauto"].startswith("✓ 100.0")
    assert "paper 100.0 ± 7.0" in needle["relu_p4_bauto"]
    assert needle["sigmoid_b0"].startswith("✗ 91.7")
    assert "paper, Llama-3.2-1B" in text_of(tree)
    assert "not comparable:" not in text_of(tree)
    assert "that its weights are the same is not verified" in text_of(tree)
    bound = judged(tree, "Calibration and bound")
    assert bound["false negatives at p = 2"][0].endswith("paper 10 of 102,000")
    assert bound["false positives at p = 2"][0].endswith("paper 41,666 of 102,000")
    assert bound["b_auto"][0].startswith("✗ 1.50 [1.31, 1.67]")


@pytest.mark.parametrize(
    ("changes", "caption", "line", "reason"),
    [
        (
            {"sweep_length": 64},
            "Needle probe, ours",
            "softmax",
            "Not comparable: prompts of 64 tokens (paper: 1,500).",
        ),
        (
            {"mqar_length": 2048},
            "Unsafe rows, ours",
            "MQAR2,048 tokens, b = 0",
            "not comparable: prompts of 2,048 tokens (paper: 4,096)",
        ),
        (
            {"calibration_length": 512},
            "Unsafe rows, ours",
            "MQAR4,096 tokens, b_auto",
            "not comparable: b_auto of 512 tokens (paper: 1,024)",
        ),
        (
            {"dtype": "float32"},
            "Needle probe, ours",
            "softmax",
            "Not comparable: float32 (paper: bfloat16).",
        ),
    ],
)
def test_unlike_numbers_are_not_judged_and_say_why(finding, changes, caption, line, reason):
    result, rows, by_head = finding
    tree = parsed(build(like_the_paper(result, **changes), rows, by_head))
    assert judged(tree, caption)[line][0][0] not in "✓≈✗"
    assert reason in text_of(tree)


def test_another_model_is_not_judged_and_one_of_another_architecture_says_so(finding):
    result, rows, by_head = finding
    needle = lines(parsed(build(*finding)), "Needle probe, ours")
    assert [cell for _, cell in needle if cell[0] in "✓≈✗"] == []
    page = text_of(parsed(build(dataclasses.replace(result, family="gpt2"), rows, by_head)))
    assert "none of them is of its architecture" in page
