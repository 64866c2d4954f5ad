"""The models that an intervention is made in: that of the run, and those to match it with."""

from collections.abc import Sequence
import dataclasses
from pathlib import Path

from lm_jax.errors import BadInputError
from protot_jax.training.saved_run import TrainedModel, load_run, run_names


@dataclasses.dataclass(frozen=True)
class SubjectModel:
    """A model with the name of the run it is from."""

    run: str
    model: TrainedModel

    def __str__(self) -> str:
        return f"{self.run}, seed {self.model.seed}, step {self.model.step}"


def load_subject_models(
    run: Path,
    *,
    other_runs: Sequence[Path] = (),
    seed: int | None = None,
    best: bool = True,
    match_seeds: bool = True,
) -> list[SubjectModel]:
    """Loads the model to intervene on, then those to match it with.

    Args:
      run: work folder of the run.
      other_runs: work folders of further runs, all seeds.
      seed: seed of the model to intervene on; None for the first seed of the run.
      best: the checkpoints of lowest validation perplexity; false for the last ones.
      match_seeds: whether to load the run's other seeds.

    Raises:
      BadInputError: a folder is not a run with a checkpoint, or has another tokenizer.
      UsageError: a run's model has no prototypes, or not this seed.
    """
    first = load_run(run, seed=seed, best=best)
    others = [(run, other) for other in first.config.seeds if other != first.seed]
    wanted = others if match_seeds else []
    for folder in other_runs:
        own = load_run(folder, best=best)
        wanted += [(folder, each) for each in own.config.seeds]
    models = [first, *(load_run(folder, seed=s, best=best) for folder, s in wanted)]
    names = run_names([run, *(folder for folder, _ in wanted)], models)
    results = list(map(SubjectModel, names, models))
    for subject in results:
        _ = subject.model.prototypes
        if subject.model.tokenizer.sha256 != first.tokenizer.sha256:
            raise BadInputError(
                f"{subject.run} has another tokenizer than {results[0].run}, so their prototypes "
                "cannot be matched; name runs on the same prepared data"
            )
    return results
