"""A training command of a small decoder, and its processes on the loopback of one machine.

    python -m tests.lm_jax.train.small_cluster --config=FILE --config.data=FOLDER --workdir=FOLDER

Every step is a checkpoint. Each process writes the ids of its rows of every batch that it reads.
"""

import dataclasses
import json
import os
import time

from absl import logging
from ml_collections import ConfigDict
import portpicker

from lm_jax.checkpoint import manager
from lm_jax.console import cli
from lm_jax.parallel import sharding
from lm_jax.run import processes, stop
from lm_jax.run.config import from_plain
from lm_jax.text.examples import Batches, Examples
from lm_jax.text.prepared import open_prepared
from lm_jax.train.config import CheckpointPolicy, TrainConfig
from lm_jax.train.loop import Hooks, TrainRun, train
from lm_jax.train.objective import LanguageModelling
from tests import tiny
from tests.lm_jax.weights.parity_pairs import launch

CFG = tiny.decoder(vocab_size=120, max_length=16)
OBJECTIVE = LanguageModelling(CFG)
STEPS, ROWS, CONTEXT, SEED = 24, 8, 11, 234
# Seconds for a start and all steps, on a machine that is busy with other work.
LIMIT = 900
TRAINING = "train"


@dataclasses.dataclass(frozen=True)
class Config:
    """Settings of the command.

    Process 0 is asked to stop after `stop_after` steps, and each step ends with a `pause` in
    seconds.
    """

    data: str
    mesh: tuple[int, int, int]
    stop_after: int
    save_every: int
    pause: float


def get_config():
    return ConfigDict(
        {"data": "", "mesh": (1, 2, 1), "stop_after": 0, "save_every": 1, "pause": 0.0}
    )


def examples(data):
    return Examples(open_prepared(data), context=CONTEXT)


class Recorded:
    """Batches of one process, of which every one read is a line of a file."""

    def __init__(self, batches, block, file):
        self._batches, self._block, self._file = batches, block, file
        self.fingerprint, self.per_epoch = batches.fingerprint, batches.per_epoch

    def at(self, k):
        batch = self._batches.at(k)
        line = {"batch": k, "block": self._block, "documents": batch["document"].tolist()}
        with self._file.open("a") as opened:
            opened.write(f"{json.dumps(line)}\n")
        return batch


def main(arguments):
    config = from_plain(arguments.config, Config)
    mesh = sharding.make_mesh(*config.mesh)
    block, blocks = sharding.batch_share(mesh)
    shared = Batches(
        examples(config.data),
        batch_size=ROWS,
        seed=SEED,
        process_index=block,
        process_count=blocks,
    )

    def on_step(step):
        time.sleep(config.pause)
        if step == config.stop_after and processes.is_first():
            stop.request()

    changes = ("mesh", "stop_after", "save_every", "pause")
    opened = processes.open_shared_workdir(arguments.folder, arguments.config, may_change=changes)
    with opened as folder:
        train(
            folder / TRAINING,
            TrainRun(
                objective=OBJECTIVE,
                config=TrainConfig(steps=STEPS, learning_rate=3e-3),
                batches=Recorded(shared, block, folder / f"batches.{os.getpid()}.jsonl"),
                seed=SEED,
            ),
            mesh,
            CheckpointPolicy(log_every=1, save_every=config.save_every, keep=STEPS),
            Hooks(on_step=on_step),
        )


def batches_read(folder):
    """Batch -> the document of each of its rows, as its processes read them, and read again."""
    blocks = {}
    for file in folder.glob("batches.*.jsonl"):
        for line in map(json.loads, file.read_text().splitlines()):
            known = blocks.setdefault(line["batch"], {})
            key = line["block"], len(line["documents"])
            assert known.setdefault(key, line["documents"]) == line["documents"]
    whole = {}
    for k, known in blocks.items():
        for size in {size for _, size in known}:
            ids = [id for block in range(ROWS // size) for id in known[block, size]]
            assert whole.setdefault(k, ids) == ids
    return whole


def start(data, folder, *flags, count=1, devices=2, each=lambda index: (), late=0, before=()):
    """The processes of one start; the last of them starts so many seconds late.

    `each` gives further flags of the process of a number; `before` are words of a command that
    takes the rest as its arguments.
    """
    common = (f"--config.data={data}", *flags)
    if count > 1:
        port = portpicker.pick_unused_port()
        common += (f"--coordinator=127.0.0.1:{port}", f"--processes={count}")
    running = []
    for index in range(count):
        if late and index == count - 1:
            time.sleep(late)
        own = (*(f"--process={index}",) * (count > 1), *each(index))
        command = "tests.lm_jax.train.small_cluster", __file__, folder
        running.append(launch(*command, devices=devices, flags=(*common, *own), before=before))
    return running


def newest(run):
    """The last step of a run that has a checkpoint; 0 before the first."""
    return max(manager.saved_steps(run / TRAINING / manager.FOLDER), default=0)


def wait_for(condition, running):
    """Returns once the condition holds."""
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, "the condition never held"
        assert all(process.poll() is None for process in running), "a process ended"
        time.sleep(0.05)


if __name__ == "__main__":
    # A line for every checkpoint would fill a pipe that is read at the end.
    logging.set_verbosity("warning")
    if "HEARTBEAT" in os.environ:
        processes._PATIENCE["heartbeat_timeout_seconds"] = int(os.environ["HEARTBEAT"])
    cli.app(main, config=__file__, config_class=Config, distributed=True, training=True)
