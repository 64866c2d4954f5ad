"""Search space of a hyperparameter search, and the proposal of trials by Optuna's samplers.

Every trial gets a new sampler, seeded by the search's seed and the trial's number, and an in-memory
study of the trials before it: so a proposal is a function of the trials on disk.

Samplers ignore failed trials, and would propose them again. A trial that diverged, or was above the
limit of FLOPs, is therefore added with the highest perplexity known so far.
"""

from collections.abc import Sequence
import dataclasses
import importlib
import importlib.util
import itertools
import json
import math
import sys
from typing import Any, Literal
import warnings

from ml_collections import ConfigDict
import numpy as np

from lm_jax.console.config_files import in_mode
from lm_jax.errors import UsageError
from lm_jax.model import flops
from lm_jax.parallel import sharding
from lm_jax.train.step import check_batch
from protot_jax.training.config import PretrainConfig, smoke, with_fields
from protot_jax.training.results import Trial
from protot_jax.training.saved_run import model

# Perplexities on other tokens, or of other seeds, are not comparable.
_SAME_IN_ALL = ("corpus", "context", "examples", "validation_documents", "seeds")
_MOST_COMBINATIONS = 1_000


@dataclasses.dataclass(frozen=True)
class SearchConfig:
    """A hyperparameter search.

    Attributes:
      base: settings that all trials share.
      learning_rate: the lowest and the highest peak of the rate that a trial may have.
      batch_sizes: examples of one update, of which each trial has one.
      choices: further fields of `base` to choose, each as `field=[value, ...]` in JSON.
      most_flops: forward FLOPs of one example, above which no trial is trained; 0 for no limit.
      trials: number of trials that are trained.
      random_trials: number of random trials before the sampler uses their results.
      sampler: "botorch" is the paper's; "tpe" and "random" need no torch.
      seed: random seed of the trials; the seeds of `base` are those of training.
    """

    base: PretrainConfig = dataclasses.field(default_factory=PretrainConfig)
    learning_rate: tuple[float, float] = (3e-5, 3e-2)
    batch_sizes: tuple[int, ...] = (32, 64, 128)
    choices: tuple[str, ...] = ()
    most_flops: float = 0.0
    trials: int = 50
    random_trials: int = 15
    sampler: Literal["botorch", "tpe", "random"] = "botorch"
    seed: int = 0

    def __post_init__(self) -> None:
        least = {"trials": 1, "random_trials": 1, "seed": 0, "most_flops": 0}
        problems = [
            f"config.{name} = {getattr(self, name)} must be at least {bound}"
            for name, bound in least.items()
            if getattr(self, name) < bound
        ]
        low, high = self.learning_rate
        if not 0 < low < high:
            problems.append(f"config.learning_rate = {self.learning_rate} must rise from above 0")
        sizes = self.batch_sizes
        if not sizes or len(set(sizes)) < len(sizes) or min(sizes) < 1:
            problems.append(f"config.batch_sizes = {sizes} must be different numbers from 1 on")
        if problems:
            raise UsageError("; ".join(problems))
        fields = [field for field, _ in map(_choice, self.choices)]
        if len(set(fields)) < len(fields):
            raise UsageError(f"config.choices name {fields}; name each field once")

    def values(self) -> dict[str, tuple[Any, ...]]:
        """The values of each searched field except the learning rate."""
        return {"batch_size": self.batch_sizes} | dict(map(_choice, self.choices))


def _choice(text: str) -> tuple[str, tuple[Any, ...]]:
    name, _, listed = text.partition("=")
    try:
        values = json.loads(listed)
    except json.JSONDecodeError:
        values = None
    scalars = isinstance(values, list) and not any(isinstance(v, dict | list) for v in values)
    if not scalars or not values or len(set(map(json.dumps, values))) < len(values):
        raise UsageError(
            f"config.choices: {text!r} is not field=[value, ...] with different JSON values; write "
            "hidden_size=[128, 256]"
        )
    if name in ("learning_rate", "batch_size"):
        raise UsageError(f"config.choices: {name} is searched as it is; set that field instead")
    if name.partition(".")[0] in _SAME_IN_ALL:
        raise UsageError(
            f"config.choices: {name} must be the same in all trials, or their perplexities are not "
            "comparable; set config.base"
        )
    return name, tuple(values)


def search(mode: str = "", **changes: Any) -> ConfigDict:
    """The `get_config(mode)` of a search; `changes` are fields of `SearchConfig`.

    Raises:
      UsageError: for an unknown mode, or settings that `SearchConfig` refuses.
    """
    return in_mode(mode, SearchConfig(**changes), {"smoke": _smoke}, of="a search")


def _smoke(config: SearchConfig) -> SearchConfig:
    return dataclasses.replace(
        config,
        base=smoke(config.base),
        batch_sizes=(8, 16),
        trials=2,
        random_trials=1,
        sampler="tpe",
    )


def forward_flops(config: PretrainConfig) -> int:
    """Forward FLOPs of one example, with the vocabulary size of the config."""
    cfg, mixer = model(config, config.corpus.vocab_size)
    return flops.forward_flops(cfg, mixer, config.context).total


def check(config: SearchConfig) -> None:
    """Checks a search before anything is prepared.

    Raises:
      UsageError: the sampler is not installed; a batch does not divide over the devices; a
        combination of `choices` makes no model, or every one is over `most_flops`.
    """
    needed = ["optuna"]
    if config.sampler == "botorch":
        needed += ["optuna_integration", "botorch", "torch"]
    lacking = [name for name in needed if not _installed(name)]
    if lacking and config.sampler != "botorch":
        raise UsageError("optuna is missing; pip install 'interpretable-attention-jax[hpo]'")
    if lacking:
        raise UsageError(
            f"the sampler 'botorch' lacks {', '.join(lacking)}; pip install "
            "'interpretable-attention-jax[botorch]' (torch first where its build matters, CPU or "
            "GPU), or choose --config.sampler=tpe"
        )
    ways, fsdp, tensor = config.base.mesh
    mesh = sharding.make_mesh(data=ways, fsdp=fsdp, tensor=tensor)
    for size in config.batch_sizes:
        check_batch(size, config.base.accumulate, mesh)
    values = config.values()
    del values["batch_size"]
    count = math.prod(map(len, values.values()))
    if count > _MOST_COMBINATIONS:
        raise UsageError(
            f"config.choices make {count:,} combinations; give fewer than {_MOST_COMBINATIONS:,}"
        )
    combinations = (
        dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())
    )
    cheapest = min(forward_flops(with_fields(config.base, each)) for each in combinations)
    if config.most_flops and cheapest > config.most_flops:
        raise UsageError(
            f"config.most_flops = {config.most_flops:.3g} allows no model: the cheapest takes "
            f"{cheapest:.3g} forward on one example; raise it, or add smaller choices"
        )


def _installed(name: str) -> bool:
    # An imported package with lazy submodules may have no spec.
    return name in sys.modules or importlib.util.find_spec(name) is not None


def propose(config: SearchConfig, before: Sequence[Trial]) -> dict[str, Any]:
    """Proposes the settings of the next trial: a pure function of its arguments."""
    import optuna
    from optuna.trial import TrialState

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    low, high = config.learning_rate
    space: dict[str, optuna.distributions.BaseDistribution] = {
        "learning_rate": optuna.distributions.FloatDistribution(low, high, log=True)
    }
    for name, values in config.values().items():
        space[name] = optuna.distributions.CategoricalDistribution(values)
    worst = max((t.perplexity for t in before if t.perplexity is not None), default=None)
    with warnings.catch_warnings():
        # Optuna warns at every use of its BoTorch sampler.
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        study = optuna.create_study(sampler=_sampler(config, len(before)))
        for trial in before:
            value = worst if trial.perplexity is None else trial.perplexity
            study.add_trial(
                optuna.trial.create_trial(
                    state=TrialState.FAIL if value is None else TrialState.COMPLETE,
                    value=value,
                    params=trial.drawn,
                    distributions=space,
                )
            )
        drawn = study.ask(space).params
    # Four digits are more precise than perplexity needs, and short in a command.
    rate = min(max(float(f"{drawn['learning_rate']:.3e}"), low), high)
    return {name: drawn[name] for name in space} | {"learning_rate": rate}


def _sampler(config: SearchConfig, number: int) -> Any:
    import optuna

    # Halved, because some samplers take a signed 32-bit seed, and others add to it.
    seed = int(np.random.SeedSequence([config.seed, number]).generate_state(1)[0]) // 2
    if config.sampler == "random":
        return optuna.samplers.RandomSampler(seed=seed)
    if config.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=seed, n_startup_trials=config.random_trials)
    botorch = importlib.import_module("optuna_integration.botorch")
    return botorch.BoTorchSampler(seed=seed, n_startup_trials=config.random_trials)
