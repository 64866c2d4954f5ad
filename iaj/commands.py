"""Table of commands and their modules; imports the standard library only.

Summaries are the first lines of the modules' files, which are read without importing them, so that
`iaj --help` is fast.
"""

import importlib
from pathlib import Path
import runpy
import sys

# The words of a command -> its module, run as `python -m MODULE` would run it.
COMMANDS: dict[tuple[str, ...], str] = {
    ("quickstart",): "iaj.quickstart",
    ("polyattn", "audit"): "polyattn_jax.studies.audit",
    ("polyattn", "check"): "polyattn_jax.studies.check",
    ("polyattn", "paper"): "polyattn_jax.studies.paper",
    ("polyattn", "distill"): "polyattn_jax.studies.distill",
    ("polyattn", "rankings"): "polyattn_jax.studies.rankings",
    ("polyattn", "bench"): "polyattn_jax.studies.bench",
    ("polyattn", "haystack"): "polyattn_jax.studies.feed",
    ("protot", "subset"): "protot_jax.training.subset",
    ("protot", "pretrain"): "protot_jax.studies.pretraining",
    ("protot", "study"): "protot_jax.studies.ablations",
    ("protot", "search"): "protot_jax.studies.search",
    ("protot", "export"): "protot_jax.training.export",
    ("protot", "generate"): "protot_jax.analysis.generate",
    ("protot", "count"): "protot_jax.training.count",
    ("protot", "recall"): "protot_jax.studies.recall",
    ("protot", "concepts"): "protot_jax.studies.concepts",
    ("protot", "scores"): "protot_jax.studies.scores",
    ("protot", "intervene"): "protot_jax.studies.interventions",
    ("protot", "graph"): "protot_jax.studies.attribution",
    ("protot", "perturb"): "protot_jax.studies.perturbations",
    ("protot", "robustness"): "protot_jax.studies.robustness",
    ("protot", "judge"): "protot_jax.studies.judging",
    ("protot", "glue"): "protot_jax.studies.glue",
    ("sparse", "pair"): "sparse_jax.studies.pair",
    ("sparse", "transcoder"): "sparse_jax.studies.transcoders",
    ("sparse", "graph"): "sparse_jax.studies.graphs",
    ("sparse", "heads"): "sparse_jax.studies.heads",
    ("sparse", "lens"): "sparse_jax.studies.lens",
    ("sparse", "posttrain"): "sparse_jax.studies.posttrain",
    ("sparse", "choices"): "sparse_jax.studies.multiple_choice",
    ("sparse", "addition"): "sparse_jax.studies.addition",
    ("sparse", "circuits"): "sparse_jax.studies.circuits",
    ("sparse", "two_hop"): "sparse_jax.studies.two_hop",
    ("reproduce",): "iaj.reproduce",
    ("fetch",): "iaj.fetch",
    ("convert",): "iaj.convert",
    ("push",): "iaj.push",
    ("doctor",): "iaj.doctor",
    ("completion",): "iaj.completion",
}
_EXAMPLES = """\
  iaj quickstart
  iaj polyattn audit --config=polyattn/smollm2:quickstart --workdir=runs/smollm2
"""


def source_file(module: str) -> Path:
    """The file that a command's module runs, next to this package; of a study its declaration."""
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    if is_study(module):
        return path / "__init__.py"
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def is_study(module: str) -> bool:
    """Whether the module declares a study (`lm_jax.study`), which is a package without a main."""
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    return path.is_dir() and not (path / "__main__.py").exists()


def run(module: str) -> int:
    """Runs a command's module on `sys.argv`; returns the exit code unless the command exits."""
    if is_study(module):
        # Imported here, as it imports jax.
        from lm_jax.study import command

        return command.run(importlib.import_module(module).STUDY, sys.argv)
    runpy.run_module(module, run_name="__main__", alter_sys=True)
    return 0


def summary(module: str) -> str:
    """The first line of a module's docstring."""
    with source_file(module).open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


def help_file(words: tuple[str, ...]) -> Path:
    """The file of a command's help of one screen, which `tools/store_help.py` writes."""
    return Path(__file__).parent / "help" / f"{'_'.join(words)}.txt"


def group(words: tuple[str, ...]) -> dict[tuple[str, ...], str]:
    """The commands that begin with `words`."""
    return {name: module for name, module in COMMANDS.items() if name[: len(words)] == words}


def next_words(words: tuple[str, ...]) -> list[str]:
    """Words that can follow `words` in the name of a command."""
    return list(dict.fromkeys(name[len(words)] for name in group(words) if len(name) > len(words)))


def help_text(words: tuple[str, ...] = ()) -> str:
    """The help of all commands, or of those that begin with `words`."""
    commands = group(words)
    width = max(len(" ".join(name)) for name in commands)
    lines = [
        f"  iaj {' '.join(name):{width}}  {summary(module)}" for name, module in commands.items()
    ]
    examples = ["Examples:", _EXAMPLES] if not words else []
    return "\n".join(
        [
            *examples,
            f"Usage: iaj {' '.join([*words, *['COMMAND']])} [--FLAG=VALUE ...]",
            "",
            "Commands:",
            *lines,
            "",
            "iaj COMMAND --help shows a command's examples and flags, --help-all what each means;",
            "iaj --version the version.",
        ]
    )
