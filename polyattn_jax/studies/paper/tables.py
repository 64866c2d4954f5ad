"""Published numbers of the paper beyond those of `polyattn_jax.report.paper`, by table.

"When Does Polynomial Attention Concentrate?", Tables 5, 12 to 17, 19 to 22, 26 and 29 to 32,
Figures 4 and 5, Appendix I. Models are named as in `paper.MODELS`, recipes as in
`row_maps.RECIPES`. Accuracies, shares of rows and of heads are in percent, changes in points.
"""

from collections.abc import Mapping
import dataclasses
from typing import NamedTuple

LLAMA, QWEN, GEMMA, PYTHIA = "Llama-3.2-1B", "Qwen3-1.7B", "Gemma-4-E2B", "Pythia-1.4b"


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Accuracy of recipes on one suite.

    Attributes:
      item: the table.
      suite: the name that the suite has here (`suites.named.NAMES`).
      length: tokens of a prompt, as the paper rounds them.
      prompts: number of prompts in a cell.
      accuracy: by model and recipe, softmax among them.
    """

    item: str
    suite: str
    length: int
    prompts: int
    accuracy: Mapping[str, Mapping[str, float]]


class Matched(NamedTuple):
    """Safe rows of the needle prompts (Tables 5 and 12); `false_negative` counts rows."""

    measured: float
    predicted: float
    top_measured: float
    top_predicted: float
    own_top_measured: float
    own_top_predicted: float
    false_negative: int


class Ends(NamedTuple):
    """The 95 % intervals of the first four numbers of `Matched` (Table 13)."""

    measured: tuple[float, float]
    predicted: tuple[float, float]
    top_measured: tuple[float, float]
    top_predicted: tuple[float, float]


class AnswerKey(NamedTuple):
    """The answer's key as target (Table 14)."""

    argmax: float
    dead: float
    measured: float
    predicted: float
    top_measured: float
    top_predicted: float


class Draws(NamedTuple):
    """Changes of accuracy with `relu_p2_bauto` in K heads, 20 random sets (Tables 17 and 27)."""

    top: float
    bottom: float
    random_least: float
    random_most: float | None
    beaten: int


_FOUR = ("softmax", "relu_p2_b0", "relu_p4_bauto", "relu_p8_bauto")
_FIVE = (*_FOUR, "sigmoid_b0")


def _named(recipes: tuple[str, ...], **models: tuple[float, ...]) -> dict[str, dict[str, float]]:
    names = {"llama": LLAMA, "qwen": QWEN, "gemma": GEMMA, "pythia": PYTHIA}
    return {
        names[key]: dict(zip(recipes, row, strict=False))  # a table may end early for a model
        for key, row in models.items()
    }


SWEEPS = (
    Sweep(
        "Table 19",
        "two_needles",
        400,
        200,
        _named(
            _FIVE,
            llama=(65.5, 81.0, 93.5, 80.5, 48.5),
            qwen=(99.0, 0.0, 0.0, 3.5, 0.0),
            gemma=(82.0, 0.0, 24.5, 89.5, 0.0),
            pythia=(41.5, 0.0, 0.0, 0.0, 0.0),
        ),
    ),
    Sweep(
        "Table 20",
        "needle",
        6000,
        200,
        _named(
            _FOUR,
            llama=(100.0, 63.0, 100.0, 100.0),
            qwen=(100.0, 0.0, 0.0, 0.0),
            gemma=(100.0, 0.0, 0.0, 100.0),
        ),
    ),
    Sweep(
        "Table 21",
        "decoys",
        1500,
        200,
        _named(
            _FIVE,
            llama=(99.5, 45.0, 93.0, 51.5, 26.5),
            qwen=(99.5, 0.0, 0.0, 0.0, 0.0),
            gemma=(100.0, 0.0, 0.0, 94.5, 0.0),
            pythia=(20.0, 0.0, 0.0, 0.0, 0.0),
        ),
    ),
    Sweep(
        "Table 22",
        "pass_key",
        1500,
        200,
        _named(
            _FIVE,
            llama=(100.0, 51.0, 95.5, 95.0, 1.0),
            qwen=(100.0, 0.0, 0.0, 0.0, 0.0),
            gemma=(100.0, 0.0, 0.0, 100.0, 0.0),
        ),
    ),
    Sweep(
        "Table 30",
        "ruler_paper_single",
        4000,
        50,
        _named(
            (*_FIVE, "relu_p16_b0", "relu_p16_bauto"),
            llama=(76.0, 0.0, 4.0, 54.0, 0.0, 0.0, 0.0),
            qwen=(100.0, 0.0, 0.0, 0.0, 0.0),
            gemma=(100.0, 0.0, 0.0, 88.0, 0.0),
        ),
    ),
    Sweep(
        "Table 32",
        "ruler_paper_multi",
        4000,
        50,
        _named(
            ("softmax", "relu_p4_bauto", "relu_p8_bauto", "relu_p16_bauto"),
            llama=(64.0, 24.0, 56.0, 0.0),
            gemma=(96.0, 0.0, 80.0, 16.0),
        ),
    ),
)

# relu^4 at one bias for all models, on needles of about 1,500 tokens.
FIXED_BIAS = Sweep(
    "Table 29",
    "niah",
    1500,
    200,
    _named(
        tuple(f"relu_p4_b{bias}" for bias in range(7)),
        llama=(4.5, 100.0, 100.0, 100.0, 100.0, 100.0, 100.0),
        qwen=(0.0, 0.0, 0.0, 0.0),
        gemma=(4.0, 2.0, 0.0, 0.0),
        pythia=(0.0, 0.0, 0.0, 0.0),
    ),
)

MATCHED: Mapping[str, Mapping[str, Matched]] = {
    LLAMA: {
        "relu_p2_b0": Matched(72.3, 53.9, 30.4, 18.1, 26.5, 13.2, 63),
        "relu_p2_bauto": Matched(20.3, 6.0, 4.9, 0.0, 4.9, 0.0, 0),
        "relu_p4_bauto": Matched(55.7, 16.1, 21.2, 0.9, 27.4, 2.6, 0),
        "relu_p8_bauto": Matched(86.4, 36.3, 51.6, 9.4, 52.3, 10.1, 0),
    },
    QWEN: {
        "relu_p2_b0": Matched(2.9, 0.7, 0.0, 0.0, 0.0, 0.0, 31),
        "relu_p4_bauto": Matched(33.2, 15.2, 0.0, 0.0, 0.0, 0.0, 0),
        "relu_p8_bauto": Matched(66.3, 22.2, 21.9, 0.0, 24.5, 0.0, 0),
    },
    GEMMA: {
        "relu_p2_b0": Matched(2.0, 1.2, 0.0, 0.0, 0.0, 0.0, 0),
        "relu_p4_bauto": Matched(2.7, 0.3, 0.0, 0.0, 0.0, 0.0, 0),
        "relu_p8_bauto": Matched(18.3, 1.2, 6.1, 0.0, 3.6, 0.0, 0),
    },
    PYTHIA: {
        "relu_p2_b0": Matched(18.4, 12.1, 2.9, 2.9, 0.0, 0.0, 2),
        "relu_p4_bauto": Matched(0.1, 0.0, 0.0, 0.0, 0.0, 0.0, 0),
        "relu_p8_bauto": Matched(0.2, 0.1, 0.0, 0.0, 0.0, 0.0, 0),
    },
}
_ZERO = (0.0, 0.0)
ENDS: Mapping[str, Mapping[str, Ends]] = {
    LLAMA: {
        "relu_p2_b0": Ends((72.2, 72.5), (53.6, 54.1), (29.9, 31.0), (17.7, 18.6)),
        "relu_p2_bauto": Ends((20.1, 20.5), (5.9, 6.0), (4.4, 5.4), _ZERO),
        "relu_p4_bauto": Ends((55.5, 55.9), (16.0, 16.3), (21.0, 21.5), (0.7, 1.2)),
        "relu_p8_bauto": Ends((86.2, 86.5), (36.1, 36.5), (51.1, 52.2), (8.9, 9.8)),
    },
    QWEN: {
        "relu_p2_b0": Ends((2.9, 3.0), (0.7, 0.7), _ZERO, _ZERO),
        "relu_p8_bauto": Ends((66.2, 66.5), (22.1, 22.3), (21.4, 22.3), _ZERO),
    },
    GEMMA: {
        "relu_p2_b0": Ends((1.9, 2.0), (1.1, 1.2), _ZERO, _ZERO),
        "relu_p8_bauto": Ends((17.5, 19.2), (1.2, 1.3), (5.7, 6.4), _ZERO),
    },
    PYTHIA: {
        "relu_p2_b0": Ends((18.2, 18.5), (11.9, 12.2), (2.9, 2.9), (2.9, 2.9)),
        "relu_p8_bauto": Ends((0.1, 0.2), (0.1, 0.1), _ZERO, _ZERO),
    },
}
ANSWER_KEY: Mapping[str, Mapping[str, AnswerKey]] = {
    LLAMA: {
        "relu_p2_b0": AnswerKey(3.7, 75.4, 69.0, 49.7, 34.2, 6.5),
        "relu_p2_bauto": AnswerKey(2.9, 46.4, 23.6, 6.7, 0.0, 0.0),
        "relu_p4_bauto": AnswerKey(2.9, 46.4, 52.6, 7.9, 17.5, 0.0),
        "relu_p8_bauto": AnswerKey(2.9, 46.4, 86.4, 21.1, 72.1, 0.0),
    },
    QWEN: {
        "relu_p2_b0": AnswerKey(2.9, 22.7, 0.0, 0.0, 0.0, 0.0),
        "relu_p8_bauto": AnswerKey(3.0, 38.8, 58.3, 0.0, 53.0, 0.0),
    },
    GEMMA: {
        "relu_p2_b0": AnswerKey(4.6, 81.5, 0.0, 0.0, 0.0, 0.0),
        "relu_p8_bauto": AnswerKey(4.6, 80.3, 11.3, 0.0, 11.5, 0.0),
    },
    PYTHIA: {
        "relu_p2_b0": AnswerKey(6.4, 58.4, 0.3, 0.3, 0.0, 0.0),
        "relu_p8_bauto": AnswerKey(6.4, 0.1, 0.5, 0.2, 0.0, 0.0),
    },
}

# Needle rows with S < 1 under the sigmoid (Table 15).
SIGMOID_SAFE: Mapping[str, Mapping[str, float]] = {
    LLAMA: {"sigmoid_b0": 0.5, "sigmoid_bauto": 0.0},
    QWEN: {"sigmoid_b0": 0.0, "sigmoid_bauto": 0.0},
    GEMMA: {"sigmoid_b0": 0.0, "sigmoid_bauto": 0.0},
    PYTHIA: {"sigmoid_b0": 0.0, "sigmoid_bauto": 0.0},
}

# Heads by type among the top and the bottom K: sink, local, diffuse of either (Table 16).
COMPOSITION: Mapping[str, Mapping[int, tuple[int, ...]]] = {
    LLAMA: {20: (3, 0, 17, 20, 0, 0), 40: (6, 0, 34, 40, 0, 0), 80: (15, 1, 64, 80, 0, 0)},
    QWEN: {20: (1, 0, 19, 17, 2, 1), 40: (4, 1, 35, 35, 3, 2), 80: (12, 4, 64, 72, 3, 5)},
    GEMMA: {20: (0, 0, 20, 8, 4, 8), 40: (0, 0, 40, 16, 5, 19), 80: (2, 0, 78, 26, 8, 46)},
    PYTHIA: {20: (5, 1, 14, 9, 0, 11), 40: (7, 4, 29, 24, 3, 13), 80: (16, 11, 53, 50, 5, 25)},
}

DRAWS: Mapping[str, Mapping[int, Draws]] = {
    QWEN: {
        20: Draws(-79.0, 0.0, -1.0, 0.0, 20),
        40: Draws(-100.0, 0.0, -14.0, 0.0, 20),
        80: Draws(-100.0, 0.0, -67.0, 0.0, 20),
    },
    GEMMA: {
        20: Draws(-48.5, 0.0, -20.0, 0.0, 20),
        40: Draws(-100.0, 0.0, -98.0, 0.0, 20),
        80: Draws(-100.0, 0.0, -100.0, 0.0, 17),
    },
}
# The same on literary openings (Table 27).
LITERARY_DRAWS: Mapping[str, Mapping[int, Draws]] = {
    QWEN: {
        20: Draws(-30.0, 0.0, -1.5, None, 20),
        40: Draws(-62.5, 0.0, -43.0, None, 20),
        80: Draws(-64.0, 0.0, -43.0, None, 20),
    },
    GEMMA: {
        20: Draws(-31.5, 0.0, -23.0, None, 20),
        40: Draws(-71.0, -2.5, -26.0, None, 20),
        80: Draws(-72.5, -2.5, -72.5, None, 19),
    },
}
# Appendix D on Figure 3: every set of K <= 80 heads stays within 7 points of softmax.
WITHIN: Mapping[str, tuple[float, float]] = {LLAMA: (-7.0, 7.0)}
# Section 5.5 of Figure 4: every set of K <= 80 heads keeps all 200 needles.
NO_CHANGE = (LLAMA,)

# Of 40 single heads, those that change the accuracy on needles (Table 26).
SINGLE_HEADS: Mapping[str, int] = {QWEN: 0, GEMMA: 0}

# Unsafe rows on the RULER prompts at b_auto, by degree (Table 31).
RULER_UNSAFE: Mapping[str, Mapping[int, float]] = {
    LLAMA: {2: 89.0, 4: 65.2, 8: 28.6, 16: 10.1},
    QWEN: {2: 89.1, 4: 77.7, 8: 50.2, 16: 21.6},
    GEMMA: {2: 100.0, 4: 98.5, 8: 89.6, 16: 51.2},
    PYTHIA: {2: 99.9, 4: 99.8, 8: 99.6, 16: 99.2},
}

# Least and most unsafe rows on induction at b = 0 and p = 2, from 256 to 4,096 tokens (Appendix C).
OVER_LENGTH: Mapping[str, tuple[float, float]] = {
    LLAMA: (18.0, 22.0),
    QWEN: (90.0, 94.0),
    GEMMA: (69.0, 72.0),
}

# Accuracy of softmax on induction, by tokens (Appendix I).
INDUCTION: Mapping[str, Mapping[int, float]] = {
    LLAMA: {256: 13.0, 1024: 10.0, 4096: 22.0},
    QWEN: {256: 16.0, 1024: 2.0, 4096: 1.0},
}
