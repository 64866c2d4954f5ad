"""A user's first hour, timed: the wheel in a new environment, and what README shows.

    python -m tools.first_hour --out runs/first_hour

Outside of the checkout, with its own environment and an empty cache, it installs the wheel, opens
the first page of `iaj quickstart`, asks a pretrained model in six lines, finds the head of ten
prompts and the graph of another, looks for the prototypes of a topic, and trains on a folder of
texts: stopped once, resumed, and asked to go on with a text. Each step must give its answer, or the
tool ends with 1. `times.json` has the seconds of each step. The machine should be quiet.
"""

import argparse
from collections.abc import Callable
import json
import os
from pathlib import Path
import re
import signal
import subprocess
import sys
import tempfile
import time

from lm_jax.run.user_cache import CACHE_VARIABLE

ROOT = Path(__file__).resolve().parents[1]
# The last step ends in this many seconds, or it has not been stopped.
_STOPPED = 10
_NAMES = (
    *(("Mary", "John"), ("Anna", "Peter"), ("Sarah", "David"), ("Laura", "Paul")),
    *(("Alice", "Mark"), ("Emma", "Jack"), ("Mary", "Peter"), ("Anna", "John")),
    *(("Laura", "David"), ("Sarah", "Mark")),
)
_PYTHON = """
import lm_jax
model = lm_jax.load_pretrained("smollm2")
run = model.run("The capital of France is")
print(run.top(1), [layer[0][0] for layer in run.logit_lens()][-3:])
without = model.run("The capital of France is", edits=lm_jax.ablate("L23H4"))
print(run.logit_diff(" Paris", " London"), without.logit_diff(" Paris", " London"))
"""


class FirstHour:
    """The commands of a user in a folder of their own.

    Attributes:
      out: an empty folder outside of the checkout, in which all commands run.
      times: seconds of each step that is done, by its name.
    """

    def __init__(self, out: Path) -> None:
        self.out = out
        self.times: dict[str, float] = {}
        self._bin = out / "environment" / "bin"
        # Without paths of the checkout, and without anything that was fetched or compiled before.
        own = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        self._environment = own | {CACHE_VARIABLE: str(out / "cache")}

    def step(self, name: str, run: Callable[[], str]) -> None:
        """Runs a step and prints its seconds and its answer."""
        start = time.monotonic()
        answer = run()
        self.times[name] = round(time.monotonic() - start, 1)
        print(f"{self.times[name]:7.1f} s  {name}: {answer}", flush=True)

    def iaj(self, *arguments: str) -> str:
        """The output of a command of `iaj`, which must end with 0."""
        return self.call(str(self._bin / "iaj"), *arguments)

    def call(self, *command: str) -> str:
        """The output of a command, which must end with 0.

        Raises:
          SystemExit: it ended otherwise; its output is printed.
        """
        result = subprocess.run(
            command,
            cwd=self.out,
            env=self._environment,
            capture_output=True,
            text=True,
            check=False,
        )
        if result.returncode:
            print(result.stdout, result.stderr, sep="\n", file=sys.stderr)
            raise SystemExit(f"{' '.join(command)} ended with {result.returncode}")
        return result.stdout

    def install(self) -> str:
        """Builds the wheel, and installs it into a new environment."""
        python = sys.executable
        self.call(python, "-m", "pip", "wheel", "-q", "--no-deps", "-w", "dist", str(ROOT))
        (wheel,) = (self.out / "dist").glob("*.whl")
        self.call(python, "-m", "venv", "environment")
        self.call(str(self._bin / "python"), "-m", "pip", "install", "-q", str(wheel))
        return wheel.name

    def audit(self) -> str:
        """The verdict of an audit on a pretrained model, with what it fetches."""
        self.iaj("fetch", "smollm2", "wiki")
        self.iaj("polyattn", "audit", "--config=polyattn/smollm2:quickstart", "--workdir=audit")
        return _page(self.out / "audit", "softmax|polynomial|relu")

    def ask(self) -> str:
        """What a model says, its lens and an ablation, in six lines of Python."""
        said = self.call(str(self._bin / "python"), "-c", _PYTHON)
        return " ".join(said.split())

    def circuit(self) -> str:
        """The head that ten prompts of one's own need."""
        text = "Then, {0} and {1} went to the park. {2} gave a book to"
        rows = [
            {
                "clean": text.format(a, b, b),
                "corrupt": text.format(a, b, a),
                "answers": [f" {a}"],
                "wrong_answers": [f" {b}"],
            }
            for a, b in _NAMES
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (self.out / "mine.jsonl").write_text(lines, "utf-8")
        said = self.iaj(
            *("sparse", "circuits", "--pair=pair_192", "--task=mine.jsonl", "--workdir=circuits")
        )
        return _found(r"L\d+H\d+ carries .*?\)", said)

    def graph(self) -> str:
        """The features that cause the next token of a prompt."""
        said = self.iaj(
            *(
                "sparse",
                "graph",
                "--model=pair_192_control",
                "--transcoder=pair_192_control_transcoder",
            ),
            *("--prompt=Then, Anna and Paul went to the park. Paul gave a book to",),
            "--workdir=graph",
        )
        return _found(r"After .*? in the graph\.", said)

    def topic(self) -> str:
        """Prototypes of a model whose texts are about a topic."""
        self.iaj(
            *("protot", "concepts", "--run=protot_whole", "--texts=1000", "--ablated=0"),
            *("--judge=cached:protot_whole_labels", "--resamples=99", "--workdir=concepts"),
        )
        return _page(self.out / "concepts", "football|music|river")

    def train(self) -> str:
        """Trains on a folder of texts, with a stop after the first steps."""
        texts = self.out / "texts"
        texts.mkdir()
        pages = [*ROOT.glob("docs/**/*.md"), *ROOT.glob("*.md")]
        parts = [part for page in pages for part in page.read_text("utf-8").split("\n## ")]
        for number, part in enumerate(parts):
            (texts / f"{number}.txt").write_text(part, "utf-8")
        command = (
            *("protot", "pretrain", "--config=protot/quickstart", "--workdir=mine"),
            *("--config.corpus.source=texts", "--config.validation_documents=20"),
            "--config.epochs=12",
        )
        waited = self._stopped(*command)
        self.iaj(*command)
        said = self.iaj("protot", "generate", "--run=mine", "--prompt=The model")
        return f"stopped after {waited:.1f} s, resumed; {' '.join(said.split())[:60]}"

    def _stopped(self, *arguments: str) -> float:
        """Seconds that a command took to end after Ctrl-C, which it gets while it trains."""
        log = self.out / "stopped.log"
        with log.open("w") as file:
            process = subprocess.Popen(
                [self._bin / "iaj", *arguments],
                cwd=self.out,
                env=self._environment,
                stdout=file,
                stderr=file,
            )
            while process.poll() is None and not re.search(r"train: \d+/", log.read_text("utf-8")):
                time.sleep(0.2)
            process.send_signal(signal.SIGINT)
            start = time.monotonic()
            process.wait()
        waited = time.monotonic() - start
        if waited > _STOPPED or process.returncode == 0:
            raise SystemExit(f"stopped with {process.returncode} after {waited:.1f} s: {log}")
        return waited


def _found(pattern: str, text: str) -> str:
    """What matches in the words of a text, its lines joined."""
    found = re.search(pattern, " ".join(text.split()))
    if found is None:
        raise SystemExit(f"no {pattern!r} in:\n{text}")
    return found[0][:300]


def _page(folder: Path, words: str) -> str:
    """The first words of a report that are among some, which must be on it."""
    text = (folder / "report.html").read_text("utf-8")
    return f"report.html names {_found(words, text)!r}"


def main() -> int:
    """Runs every step, and writes their seconds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="new folder; default a temporary one")
    out = parser.parse_args().out or Path(tempfile.mkdtemp(prefix="first_hour-"))
    out.mkdir(parents=True, exist_ok=True)
    hour = FirstHour(out.resolve())
    steps = {
        "install the wheel": hour.install,
        "first page: an audit": hour.audit,
        "six lines of Python": hour.ask,
        "a circuit of ten prompts": hour.circuit,
        "a graph of a prompt": hour.graph,
        "prototypes of a topic": hour.topic,
        "train, stop, resume, generate": hour.train,
    }
    for name, run in steps.items():
        hour.step(name, run)
    hour.times["all"] = round(sum(hour.times.values()), 1)
    (out / "times.json").write_text(json.dumps(hour.times, indent=2), "utf-8")
    print(f"{hour.times['all']:7.1f} s  all; {out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
