"""Settings of rotary positions (Su et al., 2021) and of their scalings to longer contexts."""

import dataclasses

from lm_jax.errors import BadInputError

# Bounds of what float32 holds, with room for a product.
SMALLEST, LARGEST = 1e-30, 1e30


@dataclasses.dataclass(frozen=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 and later: long wavelengths slowed, short ones kept.

    Wavelengths over `original_length / low_freq_factor` are divided by `factor`, those under
    `original_length / high_freq_factor` are kept, those between are interpolated.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_length: int


@dataclasses.dataclass(frozen=True)
class LinearScaling:
    """Every frequency divided by `factor` (position interpolation)."""

    factor: float


@dataclasses.dataclass(frozen=True)
class YarnScaling:
    """Frequency scaling by YaRN (Peng et al., 2023, section 3.4).

    The index of the pair that turns so many times within `original_length` is found for `beta_fast`
    and `beta_slow`, and rounded outwards. Pairs before the first are kept, those after the second
    divided by `factor`, those between interpolated. Cosines and sines, and so what queries and keys
    are rotated to, are multiplied by `attention_factor`.
    """

    factor: float
    original_length: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0


@dataclasses.dataclass(frozen=True)
class LongRopeScaling:
    """Each pair's frequency divided by a number of its own (LongRoPE; Ding et al., 2024).

    By `short_factor` in sequences of up to `original_length` tokens and by `long_factor` in longer
    ones (`Rope.lengths`). `attention_factor` is as in `YarnScaling`, at any length.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_length: int
    attention_factor: float


@dataclasses.dataclass(frozen=True)
class DynamicScaling:
    """A base that grows with a sequence longer than `original_length` (dynamic NTK).

    Of width w, theta is multiplied by (`factor` T / `original_length` - `factor` + 1)^(w / (w - 2))
    in a sequence of T tokens (`Rope.lengths`), so that the slowest pair is slowed by what is in the
    brackets.
    """

    factor: float
    original_length: int


@dataclasses.dataclass(frozen=True)
class ProportionalScaling:
    """The first share `rotated` of the pairs turns, divided by `factor`; the rest stays (Gemma 4).

    Frequencies and pairs are those of a rotation of the whole head, where `Rope.fraction` is one
    of the first coordinates alone.
    """

    rotated: float
    factor: float = 1.0


RopeScaling = (
    Llama3Scaling
    | LinearScaling
    | YarnScaling
    | LongRopeScaling
    | DynamicScaling
    | ProportionalScaling
)


@dataclasses.dataclass(frozen=True)
class Rope:
    """Rotary positions in the rotate-half layout, on the first `fraction` of each head's width.

    Raises:
      BadInputError: listing every number that cannot be used.
    """

    theta: float = 10_000.0
    fraction: float = 1.0
    scaling: RopeScaling | None = None

    def __post_init__(self) -> None:
        problems = []
        if not 1.0 < self.theta <= LARGEST:
            problems.append(f"theta = {self.theta} must be a number above 1")
        if not 0.0 < self.fraction <= 1.0:
            problems.append(f"fraction = {self.fraction} must be above 0 and at most 1")
        scaling = {} if self.scaling is None else vars(self.scaling)
        problems += [
            f"scaling.{name} = {number} must be a positive number"
            for name, value in scaling.items()
            for number in (value if isinstance(value, tuple) else (value,))
            if not SMALLEST <= number <= LARGEST
        ]
        if isinstance(self.scaling, Llama3Scaling) and not (
            self.scaling.low_freq_factor < self.scaling.high_freq_factor
        ):
            problems.append(
                f"scaling.low_freq_factor = {self.scaling.low_freq_factor} must be below "
                f"high_freq_factor = {self.scaling.high_freq_factor}"
            )
        if isinstance(self.scaling, ProportionalScaling) and self.scaling.rotated > 1.0:
            problems.append(f"scaling.rotated = {self.scaling.rotated} must be at most 1")
        if problems:
            raise BadInputError("rotary positions: " + "; ".join(problems))

    def lengths(self, longest: int) -> range:
        """The lengths of sequences, up to `longest`, that differ in their frequencies.

        Shorter sequences have the frequencies of the first, longer ones those of the last. There is
        more than one only if the scaling depends on the length (LongRoPE, dynamic NTK): that is how
        many tokens a row has after a pass, without padding and whatever its cache has room for.
        """
        match self.scaling:
            case LongRopeScaling(original_length=first):
                return range(first, max(min(longest, first + 1), first) + 1)
            case DynamicScaling(original_length=first):
                return range(first, max(longest, first) + 1)
        return range(1, 2)
