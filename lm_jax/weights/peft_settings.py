"""The settings of a PEFT adapter, `adapter_config.json`: read, or refused where unsupported."""

from collections.abc import Mapping
import dataclasses
import math
from pathlib import Path
import re
from typing import Any

from lm_jax.errors import BadInputError
from lm_jax.weights.safetensors import read_object, shortened

CONFIG = "adapter_config.json"
# Settings that change nothing in a trained adapter. The layout of a matrix, which `fan_in_fan_out`
# is of, PEFT itself takes from the module; the layer's index is plain in the families' names.
_WITHOUT_EFFECT = (
    *("task_type", "inference_mode", "lora_dropout", "auto_mapping", "peft_version"),
    *("fan_in_fan_out", "layers_pattern", "megatron_core", "qalora_group_size", "runtime_config"),
)
# What adapters are over and how they began, which are no part of their update.
_OF_THE_BEGINNING = ("base_model_name_or_path", "revision", "init_lora_weights")
# Other ways to begin change the base as well.
_FRESH = (True, False, "gaussian", "orthogonal", "eva")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What decides the update of the weights; names, defaults and rules are PEFT's."""

    peft_type: str | None = None
    base_model_name_or_path: str | None = None
    revision: str | None = None
    r: int = 8
    lora_alpha: float = 8
    use_rslora: bool = False
    target_modules: str | list[str] | None = None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    rank_pattern: Mapping[str, int] | None = None
    alpha_pattern: Mapping[str, float] | None = None
    init_lora_weights: bool | str | None = True
    bias: str = "none"

    @property
    def strength(self) -> float:
        """What multiplies B A where no pattern says otherwise: alpha / r, of rsLoRA / sqrt(r)."""
        return self._strength(self.r, self.lora_alpha)

    def of_update(self) -> dict[str, Any]:
        """Plain data that is equal for equal updates: neither base nor beginning nor defaults.

        Lists are in one order; of patterns the first that fits counts, so that theirs is kept.
        """
        plain: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, Mapping):
                value = [[pattern, each] for pattern, each in value.items()] or None
            elif isinstance(value, list):
                value = sorted(value)
            if field.name not in _OF_THE_BEGINNING and value != field.default:
                plain[field.name] = value
        return plain

    def _strength(self, rank: int, alpha: float) -> float:
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    def adapts(self, module: str, layer: int) -> bool:
        """Whether a module in this layer has an adapter."""
        only = self.layers_to_transform
        layers = [only] if isinstance(only, int) else only or [layer]
        if layer not in layers:
            return False
        return _names(self.target_modules, module) and not _names(self.exclude_modules, module)

    def of_module(self, module: str) -> tuple[int, float]:
        """The rank of a module and what multiplies its B A."""
        rank = _by_pattern(self.rank_pattern, module, self.r)
        return rank, self._strength(rank, _by_pattern(self.alpha_pattern, module, self.lora_alpha))


def _names(chosen: str | list[str] | None, module: str) -> bool:
    """A string is a regular expression of the whole name; a list has names or their last words."""
    if isinstance(chosen, str):
        return re.fullmatch(chosen, module) is not None
    return any(module == each or module.endswith(f".{each}") for each in chosen or ())


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    fitting = (v for key, v in (patterns or {}).items() if re.match(rf"(.*\.)?({key})$", module))
    return next(fitting, default)


def is_peft(path: Path) -> bool:
    """Whether it is a folder of adapters, without a model of its own."""
    return (path / CONFIG).is_file() and not (path / "config.json").exists()


def read_settings(path: Path) -> Settings:
    """The settings in an adapter_config.json.

    Raises:
      BadInputError: it cannot be read, or fields are malformed or not supported (all at once).
    """
    raw = read_object(path)
    fields = {field.name for field in dataclasses.fields(Settings)}
    settings = Settings(**{name: value for name, value in raw.items() if name in fields})
    supported = {
        "peft_type": settings.peft_type == "LORA",
        "bias": settings.bias == "none",
        "init_lora_weights": settings.init_lora_weights in (*_FRESH, None),
        "r": _is_rank(settings.r),
        "lora_alpha": _is_strength(settings.lora_alpha),
        "use_rslora": isinstance(settings.use_rslora, bool),
        "target_modules": bool(settings.target_modules) and _is_choice(settings.target_modules),
        "exclude_modules": _is_choice(settings.exclude_modules),
        "layers_to_transform": _are_layers(settings.layers_to_transform),
        "rank_pattern": _are_patterns(settings.rank_pattern, _is_rank),
        "alpha_pattern": _are_patterns(settings.alpha_pattern, _is_strength),
        "base_model_name_or_path": isinstance(settings.base_model_name_or_path, str | None),
    }
    problems = [
        f"{name} = {getattr(settings, name)!r}" for name, holds in supported.items() if not holds
    ]
    problems += [
        f"{name} = {value!r}"
        for name, value in raw.items()
        if name not in fields and name not in _WITHOUT_EFFECT and not _is_unset(value)
    ]
    if problems:
        raise BadInputError(
            f"{path}: not supported: {shortened(problems)}; use a LoRA adapter of PEFT that sets "
            "r, lora_alpha and target_modules alone"
        )
    return settings


def _is_unset(value: Any) -> bool:
    return value is None or value is False or value in ([], {}, "")


def _is_rank(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_strength(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _is_choice(value: Any) -> bool:
    if isinstance(value, str):
        return _compiles(value)
    return value is None or (isinstance(value, list) and all(isinstance(v, str) for v in value))


def _are_layers(value: Any) -> bool:
    layers = value if isinstance(value, list) else [value]
    return value is None or all(type(layer) is int for layer in layers)


def _are_patterns(value: Any, holds: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, dict) and all(_compiles(k) and holds(v) for k, v in value.items())


def _compiles(pattern: str) -> bool:
    try:
        re.compile(pattern)
    except re.error:
        return False
    return True
