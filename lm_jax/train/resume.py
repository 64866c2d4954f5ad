"""Checkpoints of a run, and what they hold besides the state: the history of its evaluations.

A run has checkpoints that all its processes share (`checkpoint.manager`), and where the launch asks
for it more frequent ones on a disk of each node (`checkpoint.local`).
"""

import dataclasses
from pathlib import Path
import secrets

from lm_jax.checkpoint import local, manager
from lm_jax.run import processes
from lm_jax.run.config import config_hash
from lm_jax.run.files import make_folder, read_json, write_json
from lm_jax.train import launch
from lm_jax.train.config import CheckpointPolicy, TrainConfig
from lm_jax.train.metrics import STEPS, count_steps
from lm_jax.train.state import TrainState

_RUN_ID = "run_id.json"


@dataclasses.dataclass(frozen=True)
class EvalHistory:
    """Evaluation history of a run, kept in every checkpoint.

    `last` and `best` are losses per token of the evaluations so far, or what the `criterion` of
    `Hooks` makes of them, `best_step` is the step of the best, and `stalled` counts the evaluations
    in a row without the gain that `TrainConfig.plateau` asks for.
    """

    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    stopped_early: bool = False
    stalled: int = 0

    def with_loss(
        self, loss: float, step: int, config: TrainConfig, *, done: bool = False
    ) -> "EvalHistory":
        """The history after one more evaluation; `done` ends training whatever the loss."""
        rose = self.last is not None and loss > self.last
        better = self.best is None or loss < self.best
        plateau, stalled = config.plateau, 0
        if plateau is not None and self.best is not None and loss > self.best - plateau.min_gain:
            stalled = self.stalled + 1
        ended = plateau is not None and stalled >= plateau.patience
        return EvalHistory(
            last=loss,
            best=loss if better else self.best,
            best_step=step if better else self.best_step,
            stopped_early=(config.early_stop and rose) or ended or done,
            stalled=stalled,
        )


class RunCheckpoints:
    """Checkpoints of a run: in its folder, and on the local disk where the launch asks for it.

    Attributes:
      identity: what the checkpoints are bound to.
      fingerprint: what the rows are bound to, a hash.
      folder: folder of the checkpoints that all processes share.
    """

    def __init__(
        self,
        folder: Path,
        identity: manager.Identity,
        policy: CheckpointPolicy,
        columns: tuple[str, ...],
    ) -> None:
        """Makes the folder of the run, if need be.

        Args:
          folder: folder of the run.
          identity: what the checkpoints are bound to.
          policy: how many checkpoints stay, and whether a damaged one is passed over.
          columns: columns of the run's rows that are its objective's.
        """
        self.identity, self._policy = identity, policy
        self._run_folder, self._columns = folder, columns
        self.fingerprint = config_hash({"run": identity.config, "data": identity.fingerprint})
        self.folder = folder / manager.FOLDER
        make_folder(folder)
        launched = launch.options()
        self._tier = launched.local_checkpoints and local.own_folder(
            launched.local_checkpoints, folder
        )
        self._local_every = launched.local_every
        self._run_id = _run_id(folder)

    def restore(self, target: TrainState) -> manager.Restored | None:
        """The newest checkpoint, shared or local; None at a first start."""
        shared = manager.newest(
            self.folder, self.identity, allow_fallback=self._policy.allow_fallback
        )
        restored = None
        if self._tier is not None:
            # Rows come before checkpoints: a folder that lacks them was set back.
            written = processes.on_first(
                lambda: count_steps(self._run_folder, self.fingerprint, self._columns)
            )
            restored = local.restore(
                self._tier,
                target,
                self.identity,
                newer_than=shared or 0,
                up_to=written,
                run=self._run_id,
            )
        if restored is None and shared is not None:
            restored = manager.load(self.folder, shared, target)
        return restored

    def save(self, state: TrainState, history: EvalHistory) -> None:
        """Saves a checkpoint that all processes share."""
        manager.save(
            self.folder,
            state,
            identity=self.identity,
            progress=dataclasses.asdict(history),
            keep=self._policy.keep,
            best=history.best_step,
        )

    def saves_locally(self, step: int) -> bool:
        """Whether a local checkpoint is due after a step."""
        return self._tier is not None and step % self._local_every == 0

    def save_locally(self, state: TrainState, history: EvalHistory) -> None:
        """Saves the part of this process on its local disk."""
        assert self._tier is not None
        local.save(
            self._tier,
            state,
            identity=self.identity,
            progress=dataclasses.asdict(history),
            run=self._run_id,
        )

    def remove_local(self) -> None:
        """Removes the local checkpoints of this process; for a run that is finished."""
        if self._tier is not None:
            local.remove(self._tier)


def _run_id(folder: Path) -> str | None:
    """The random id that a run writes at its first start; None if it began without one."""
    file = folder / _RUN_ID

    def write() -> None:
        if not file.exists() and not (folder / STEPS).exists():
            write_json(file, {"id": secrets.token_hex(16)})

    processes.on_first(write)
    return read_json(file)["id"] if file.exists() else None
