"""Table of commands and their modules; imports the standard library only.

Summaries are the first lines of the modules' files, which are read without importing them, so that
`iaj --help` is fast.
"""

from pathlib import Path

# The words of a command -> its module, run as `python -m MODULE` would run it.
COMMANDS: dict[tuple[str, ...], str] = {
    ("quickstart",): "iaj.quickstart",
    ("polyattn", "audit"): "polyattn_jax.audit",
    ("polyattn", "check"): "polyattn_jax.check",
    ("polyattn", "paper"): "polyattn_jax.paper_study",
    ("polyattn", "distill"): "polyattn_jax.distill",
    ("polyattn", "haystack"): "polyattn_jax.feed",
    ("protot", "subset"): "protot_jax.subset",
    ("protot", "pretrain"): "protot_jax.pretrain",
    ("protot", "study"): "protot_jax.study",
    ("protot", "search"): "protot_jax.search",
    ("protot", "export"): "protot_jax.export",
    ("protot", "generate"): "protot_jax.generate",
    ("protot", "count"): "protot_jax.count",
    ("protot", "recall"): "protot_jax.recall",
    ("protot", "concepts"): "protot_jax.concepts",
    ("protot", "scores"): "protot_jax.concepts.compare_scores",
    ("protot", "intervene"): "protot_jax.interventions",
    ("protot", "graph"): "protot_jax.attribution",
    ("protot", "perturb"): "protot_jax.robustness.benchmark",
    ("protot", "robustness"): "protot_jax.robustness",
    ("protot", "judge"): "protot_jax.judging",
    ("protot", "glue"): "protot_jax.glue",
    ("sparse", "pair"): "sparse_jax.pair",
    ("sparse", "transcoder"): "sparse_jax.transcoders",
    ("sparse", "graph"): "sparse_jax.graphs",
    ("sparse", "posttrain"): "sparse_jax.posttrain",
    ("sparse", "choices"): "sparse_jax.multiple_choice",
    ("sparse", "addition"): "sparse_jax.addition",
    ("sparse", "circuits"): "sparse_jax.circuits",
    ("sparse", "two_hop"): "sparse_jax.two_hop",
    ("reproduce",): "iaj.reproduce",
    ("fetch",): "iaj.fetch",
    ("convert",): "iaj.convert",
    ("doctor",): "iaj.doctor",
    ("completion",): "iaj.completion",
}
_EXAMPLES = """\
  iaj quickstart
  iaj polyattn audit --config=polyattn/smollm2:quickstart --workdir=runs/smollm2
"""


def source_file(module: str) -> Path:
    """The file that `python -m MODULE` runs, next to this package."""
    path = Path(__file__).parents[1].joinpath(*module.split("."))
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def summary(module: str) -> str:
    """The first line of a module's docstring."""
    with source_file(module).open(encoding="utf-8") as file:
        return file.readline().strip().strip('"')


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
            "iaj COMMAND --help shows a command's examples and flags, iaj --version the version.",
        ]
    )
