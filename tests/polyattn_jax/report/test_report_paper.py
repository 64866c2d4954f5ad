"""Our numbers and the paper's: judged where model, lengths and prompts agree, else why not."""

import dataclasses

import pytest

from tests.polyattn_jax.synthetic_report import build, lines, parsed, text_of

ITEMS = ("Table 1", "Table 3", "Table 8", "Table 10", "Table 11", "Appendix J")
CHANGE = "change of accuracy, points"
UNVERIFIED = "weights of the name Llama-3.2-1B, not verified"


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


def compared(tree, item):
    """By cell with its suite and quantity: the paper's number, ours, and what differs."""
    return {(row[0], row[1]): tuple(row[3:]) for row in lines(tree, f"The paper's {item} beside")}


def marked(tree):
    """The numbers of ours that are judged."""
    ours = [ours for item in ITEMS for _, ours, _ in compared(tree, item).values()]
    return [text for text in ours if text[0] in "✓≈✗"]


def test_a_model_of_the_paper_is_judged_where_length_and_prompts_agree(finding):
    result, rows, by_head = finding
    tree = parsed(build(like_the_paper(result), rows, by_head))
    needle = compared(tree, "Table 3")
    theirs, ours, causes = needle["relu_p4_bautoniah_1536", CHANGE]
    assert (theirs, ours[:5], causes) == ("+0.0± 7.0", "✓ +0.", UNVERIFIED)
    assert needle["sigmoid_b0niah_1536", CHANGE][1].startswith("✗ −8.3")
    assert "paper, Llama-3.2-1B" in text_of(tree)
    assert "that its weights are the same is not verified" in text_of(tree)
    bound = compared(tree, "Table 8")
    cell = "p = 2, b = 0induction"
    assert bound[cell, "bound and measure agree, %"][0] == "59.0± 5.0"
    assert bound[cell, "false negatives, rows"][0] == "10"
    assert bound[cell, "false positives, rows"][0] == "41,666"
    (b_auto,) = compared(tree, "Appendix J").values()
    assert b_auto[1].startswith("✗ 1.5")
    # The paper prints one share of dead rows for both biases.
    dead = [row for key, row in compared(tree, "Table 10").items() if key[1].startswith("dead")]
    assert dead and not [ours for _, ours, _ in dead if ours[0] in "✓≈✗"]


@pytest.mark.parametrize(
    ("changes", "item", "line", "reason"),
    [
        (
            {"sweep_length": 64},
            "Table 3",
            ("softmaxniah_64", "accuracy, %"),
            "prompts of 64 tokens (paper: 1,500)",
        ),
        (
            {"mqar_length": 2048},
            "Table 1",
            ("p = 2, b = 0mqar", "unsafe rows, %"),
            "prompts of 2,048 tokens (paper: 4,096)",
        ),
        (
            {"calibration_length": 512},
            "Table 11",
            ("p = 2, b_automqar", "unsafe rows, %"),
            "b_auto of 512 tokens (paper: 1,024)",
        ),
        (
            {"calibration_length": 512},
            "Table 3",
            ("relu_p4_bautoniah_1536", CHANGE),
            "b_auto of 512 tokens (paper: 1,024)",
        ),
        (
            {"dtype": "float32"},
            "Table 3",
            ("softmaxniah_1536", "accuracy, %"),
            "float32 (paper: bfloat16)",
        ),
        (
            {"induction_n": 99},
            "Table 8",
            ("p = 2, b = 0induction", "bound and measure agree, %"),
            "99 prompts (paper: 200)",
        ),
    ],
)
def test_unlike_numbers_are_not_judged_and_say_why(finding, changes, item, line, reason):
    result, rows, by_head = finding
    like, unlike = (
        compared(parsed(build(like_the_paper(result, **each), rows, by_head)), item)
        for each in ({}, changes)
    )
    theirs, ours, causes = unlike[line]
    assert (ours[0] in "✓≈✗", "±" in theirs) == (False, False)
    assert causes == f"{UNVERIFIED}; {reason}"
    assert [row for row in like.values() if row[1][0] in "✓≈✗"]


def test_few_short_prompts_of_a_model_of_the_paper_are_not_judged(finding):
    result, rows, by_head = finding
    tree = parsed(build(dataclasses.replace(result, model="models/Llama-3.2-1B"), rows, by_head))
    assert marked(tree) == []
    shape = "3 layers of 2 heads (paper: 16 of 32); float32 (paper: bfloat16)"
    why = f"{shape}; prompts of 64 tokens (paper: 4,096); 12 prompts (paper: 200)"
    assert f"{UNVERIFIED}; {why}" in text_of(tree)
    (b_auto,) = compared(tree, "Appendix J").values()
    assert b_auto[-1] == f"{UNVERIFIED}; {shape}; b_auto of 64 tokens (paper: 1,024)"
    assert "paper, Llama-3.2-1B" not in text_of(tree)


def test_another_model_is_not_judged_and_one_of_another_architecture_says_so(finding):
    result, rows, by_head = finding
    tree = parsed(build(*finding))
    assert marked(tree) == []
    assert compared(tree, "Table 3")["relu_p4_bautoniah_64", CHANGE][0] == "+0.0"
    page = text_of(parsed(build(dataclasses.replace(result, family="gpt2"), rows, by_head)))
    assert "none of them is of its architecture" in page
    assert "beside ours; n counts prompts" not in page


def test_what_differs_from_the_paper_is_what_the_settings_say(finding):
    result, rows, by_head = finding
    without = parsed(build(*finding))
    named = {row[0]: row[1] for row in lines(without, "This audit and")}
    assert named["Literary probe"] == "left out"
    assert named["Ablation"].endswith("needle probe")
    assert "This audit has no such probe." in text_of(without)
    changes = {"suites": ("copying",), "suite_n": 200, "suite_lengths": (512,)}
    config = dataclasses.replace(result.config, **changes, ablation_suites=("copying",))
    tree = parsed(build(dataclasses.replace(result, config=config), rows, by_head))
    named = {row[0]: row[1:] for row in lines(tree, "This audit and")}
    assert named["Literary probe"] == [
        "54 of 54 openings, one prompt each, at 512 tokens",
        "200 openings, known by heart (contaminated)",
    ]
    assert named["Ablation"][0].endswith("needle and literary openings probe")
    assert "This audit has its own above." in text_of(tree)
