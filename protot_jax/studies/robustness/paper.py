"""The paper's published robustness numbers (section 5.2, appendix A.5), to print beside ours."""

from typing import NamedTuple

# The order of the columns below; `of_slice` has our names for them.
SLICES = ("abbreviation", "contraction", "morphology", "punctuation", "spelling", "synonym", "typo")
MEANING = ("gender", "negation", "number")
# Our models -> the paper's names.
NAMES = {"deltanet": "DeltaNet", "llama": "LLaMA", "mamba": "Mamba", "protot": "ProtoAttn"}

# Table 3, called Jensen-Shannon divergence there.
_JS = {
    "deltanet": (1.0657, 0.8310, 0.6671, 0.5804, 0.3547, 0.6363, 0.6257),
    "llama": (0.3325, 0.0449, 0.2267, 0.1740, 0.0634, 0.1450, 0.2269),
    "mamba": (0.1441, 0.0104, 0.0476, 0.4428, 0.0054, 0.0130, 0.0761),
    "protot": (0.4166, 0.0823, 0.0498, 0.3982, 0.0260, 0.1132, 0.2074),
}


class Mediated(NamedTuple):
    """A row of Table 4; each of 500 pairs."""

    mean: float
    deviation: float
    positive: float
    js_base: float
    js_clamped: float

    @property
    def ratio_of_means(self) -> float:
        """1 - JS_clamped / JS_base of the printed means, which the paper does not print."""
        return 1 - self.js_clamped / self.js_base


_PMR = {
    "abbreviation": Mediated(-0.093, 0.367, 0.596, 0.417, 0.415),
    "contraction": Mediated(-0.027, 0.104, 0.330, 0.082, 0.083),
    "morphology": Mediated(-0.034, 0.176, 0.474, 0.050, 0.051),
    "punctuation": Mediated(-0.000, 0.373, 0.554, 0.398, 0.322),
    "spelling": Mediated(-0.033, 0.225, 0.610, 0.026, 0.025),
    "synonym": Mediated(0.013, 0.075, 0.606, 0.113, 0.109),
    "typo": Mediated(0.001, 0.279, 0.533, 0.208, 0.186),
}


class Flipped(NamedTuple):
    """Entries of Table 5 for one model and one slice."""

    js: float
    overlap: float
    spearman: float
    same_top: float


_FLIPS = {
    "deltanet": (
        Flipped(0.054, 0.754, 0.610, 0.616),
        Flipped(0.173, 0.540, 0.176, 0.388),
        Flipped(0.282, 0.474, 0.033, 0.330),
    ),
    "llama": (
        Flipped(0.004, 0.946, 0.966, 0.890),
        Flipped(0.028, 0.875, 0.815, 0.770),
        Flipped(0.022, 0.843, 0.824, 0.930),
    ),
    "mamba": (
        Flipped(0.003, 0.936, 0.949, 0.884),
        Flipped(0.006, 0.935, 0.910, 0.992),
        Flipped(0.007, 0.907, 0.907, 0.948),
    ),
    "protot": (
        Flipped(0.037, 0.709, 0.429, 0.690),
        Flipped(0.081, 0.774, 0.536, 0.806),
        Flipped(0.083, 0.657, 0.441, 0.806),
    ),
}

# Table 12: mean similarity by all-MiniLM-L6-v2, and mean edit distance in characters.
_STRENGTH = {
    "synonym": (0.828, 5.89),
    "typo": (0.775, 1.03),
    "spelling": (0.956, 1.20),
    "morphology": (0.881, 1.00),
    "contraction": (0.895, 2.54),
    "punctuation": (0.983, 1.09),
    "abbreviation": (0.894, 7.23),
}

# Two forms of a slice stand beside one column.
_OTHER_FORMS = {
    "morphology_any": "morphology",
    "synonym_pos": "synonym",
    "typo_any": "typo",
}


def divergence(model: str, name: str) -> float | None:
    """Table 3's entry of one of our models and slices; None where there is none."""
    name = _column(name)
    if model not in _JS or name not in SLICES:
        return None
    return _JS[model][SLICES.index(name)]


def mediated(name: str) -> Mediated | None:
    """Table 4's row of one of our slices."""
    return _PMR.get(_column(name))


def flip(model: str, name: str) -> Flipped | None:
    """Table 5's entries; the paper's sentences end in a tag."""
    kind = name.removesuffix("_tag")
    if model not in _FLIPS or kind not in MEANING or kind == name:
        return None
    return _FLIPS[model][MEANING.index(kind)]


def strength(name: str) -> tuple[float, float] | None:
    """Table 12's similarity and edit distance of one of our slices."""
    return _STRENGTH.get(_column(name))


def _column(name: str) -> str:
    return _OTHER_FORMS.get(name, name)
