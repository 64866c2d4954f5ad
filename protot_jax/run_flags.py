"""The flags of every command that reads a finished run.

absl keeps the flags of all commands in one table, where a name can be defined once. A command names
those it takes with `flags.declare_key_flag`, or all with `flags.adopt_module_key_flags(run_flags)`.
"""

from pathlib import Path

from absl import flags

from lm_jax.errors import UsageError
from protot_jax.saved_run import TrainedModel, load_run

RUN = flags.DEFINE_string("run", None, "work folder of a pretraining run")
CHECKPOINT = flags.DEFINE_enum(
    "checkpoint", "best", ["best", "last"], "of lowest validation perplexity, or the last one"
)
RUN_SEED = flags.DEFINE_integer("run_seed", None, "which of the run's seeds; default first")


def run_folder() -> Path:
    """The folder that `--run` names.

    Raises:
      UsageError: none is named.
    """
    if not RUN.value:
        raise UsageError("--run is missing; name the work folder of a pretraining run")
    return Path(RUN.value)


def load() -> TrainedModel:
    """The model that the flags name.

    Raises:
      UsageError: no run is named, or a seed that it does not have.
      BadInputError, CorruptError: as `load_run`.
    """
    return load_run(run_folder(), seed=RUN_SEED.value, best=CHECKPOINT.value == "best")
