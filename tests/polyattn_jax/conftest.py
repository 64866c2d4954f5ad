"""A tiny Llama that finds needles, its tokenizer and a haystack, as files an audit can be run on.

The weights are random and small but for one circuit in one head, which makes the model solve the
needle suite: a query at "is" scores every noun high, and the noun's code is copied to the output.
So softmax and a steep row map retrieve, a map whose rows all die does not, and all other heads give
generic score rows.
"""

from collections.abc import Callable
import contextlib
import dataclasses
import functools
import io
import itertools
import json
from pathlib import Path
import re
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models, pre_tokenizers

import lm_jax
from lm_jax.console import cli
from lm_jax.run.results import load_result
from lm_jax.study import Study
from lm_jax.study import command as study_command
from lm_jax.text.tokenizer import Tokenizer
from polyattn_jax import suites
from polyattn_jax.audit import model_calibration
from polyattn_jax.audit.results import AuditSummary
from polyattn_jax.studies import audit, check
from polyattn_jax.suites.niah import CUE, HARMLESS
from tests.polyattn_jax import synthetic_report
from tests.polyattn_jax.synthetic_suites import VOCABULARY, WordTokenizer
from tests.tiny import params as drawn

ROOT = Path(__file__).parents[2]
FRAME = re.findall(r"\w+|\.", " ".join([CUE, *HARMLESS]))
PROSE = re.findall(
    r"\w+",
    "a this that every some small large bright slow early late people travel work wait sing often "
    "never always there near far away again together home today",
)
LAYER, HEAD = 1, 2
CODE = 12
QUESTIONS = 12
# Tokens that are read of a text.
TEXT_LENGTH = 40
# Named suites, and a recipe under which every row dies.
SUITES = ("needle", "decoys")
HOPELESS = "ramapuram:b=-1000"


def tiny_tokenizer() -> Tokenizer:
    """One token for each noun, each other word of the prompts and of the calibration text."""
    split = pre_tokenizers.Whitespace()
    texts = model_calibration.calibration_texts().values()
    shipped = [word for text in texts for word, _ in split.pre_tokenize_str(text)]
    words = [*FRAME, *PROSE, *map(str.title, PROSE), *suites.shipped_nouns(), *shipped]
    vocabulary = {word: i for i, word in enumerate(dict.fromkeys(["<unk>", *words]))}
    backend = Backend(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = split
    return Tokenizer(backend)


def tiny_params(cfg: lm_jax.DecoderConfig, tokenizer: Tokenizer) -> Any:
    """Random parameters with the circuit of the docstring written over them.

    Of D, coordinate 0 marks a noun, 1 marks the cue word, then come a noun's code and, where the
    head puts it, its copy, which alone the rows of nouns in the output matrix read.
    """
    params = jax.tree.map(
        lambda a: 0.4 * np.array(a), lm_jax.init_params(jax.random.key(0), cfg, dtype=np.float32)
    )
    code, copy = slice(2, 2 + CODE), slice(2 + CODE, 2 + 2 * CODE)
    embed_VD, unembed_DV = params["embed"]["tokens"], params["unembed"]
    # Scores of the other heads are of order one, as in a trained model.
    for name in ("q", "k"):
        params["blocks"]["mixer"][name] *= 8.0
    params["final"]["scale"][:] = 1.0
    for name in ("ln1", "ln2"):
        params["blocks"][name]["scale"][:] = 1.0
    rng = np.random.default_rng(0)
    embed_VD[:] = 0.3 * rng.standard_normal(embed_VD.shape)
    unembed_DV[:] = 0.02 * rng.standard_normal(unembed_DV.shape)
    embed_VD[:, : 2 + 2 * CODE] = 0.0
    for noun in suites.shipped_nouns():
        i = tokenizer.backend.token_to_id(noun)
        direction = rng.standard_normal(CODE)
        direction *= 2 / np.linalg.norm(direction)
        embed_VD[i, 0], embed_VD[i, code] = 2.0, direction
        unembed_DV[:, i], unembed_DV[copy, i] = 0.0, direction
    embed_VD[tokenizer.backend.token_to_id("is"), 1] = 2.0
    mixer, group = params["blocks"]["mixer"], HEAD // (cfg.num_heads // cfg.num_kv_heads)
    q_DH, k_DH, v_DH = (
        mixer["q"][LAYER, :, HEAD],
        mixer["k"][LAYER, :, group],
        mixer["v"][LAYER, :, group],
    )
    for w_DH in (q_DH, k_DH, v_DH):
        w_DH[:] = 0.0
    # The slowest of the rotary frequencies hardly turns within a prompt.
    still = cfg.head_dim // 2 - 1
    q_DH[1, still], k_DH[0, still] = 6.0, 6.0
    v_DH[code, :CODE] = np.eye(CODE)
    mixer["o"][LAYER, HEAD] = 0.0
    mixer["o"][LAYER, HEAD, :CODE, copy] = 4 * np.eye(CODE)
    return params


@pytest.fixture(scope="session")
def tokenizer() -> WordTokenizer:
    """One token for each word of the synthetic suites."""
    return WordTokenizer(VOCABULARY)


@pytest.fixture(scope="session")
def starting() -> WordTokenizer:
    """As `tokenizer`, with a token before each text."""
    return WordTokenizer(VOCABULARY, start=True)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the model."""
    tokenizer = tiny_tokenizer()
    cfg = lm_jax.DecoderConfig(
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        hidden_size=40,
        mlp_size=16,
        vocab_size=tokenizer.vocab_size,
        max_length=256,
        rope=lm_jax.Rope(theta=1e6),
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    lm_jax.save_pretrained(folder, cfg, tiny_params(cfg, tokenizer), tokenizer)
    return folder


@pytest.fixture(scope="session")
def haystack(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A text of distinct sentences without a noun of the needle list."""
    rng = np.random.default_rng(0)
    sentences = []
    for _ in range(200):
        first, *rest = rng.choice(PROSE, rng.integers(4, 10))
        sentences.append(f"{first.title()} {' '.join(rest)}.")
    path = tmp_path_factory.mktemp("text") / "haystack.txt"
    path.write_text(" ".join(sentences), "utf-8")
    return path


def write_documents(folder: Path) -> Path:
    """Writes a new folder of documents of a few words that the tiny model knows; returns it."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(60):
        words = rng.choice(PROSE, rng.integers(30, 70))
        (folder / f"{i:02d}.txt").write_text(" ".join(words), "utf-8")
    return folder


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a command ended: exit code, standard output, lines of standard error."""

    code: int
    out: str
    err: list[str]

    @property
    def refusals(self) -> list[str]:
        """The lines of standard error that are no progress."""
        return [line for line in self.err if line.startswith(("error: ", "stopped: "))]


Command = Callable[..., Outcome]


def run(main: cli.Main, argv: list[str], **options: Any) -> Outcome:
    """Runs a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(main, ["command", *argv], **options)
    return Outcome(code, out.getvalue(), err.getvalue().splitlines())


def run_study(study: Study, argv: list[str]) -> Outcome:
    """Runs a study as a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = study_command.run(study, ["command", *argv])
    return Outcome(code, out.getvalue(), err.getvalue().splitlines())


@pytest.fixture(scope="session")
def audit_arguments(tiny: Path, haystack: Path) -> list[str]:
    """The arguments of an audit of the tiny model that takes a second once it is compiled."""
    return [
        f"--config={ROOT}/configs/polyattn/smollm2.py:smoke",
        f"--config.model={tiny}",
        f"--config.haystack={haystack}",
        "--config.niah_n=7",
        "--config.control_n=3",
        "--config.induction_n=4",
        "--config.mqar_n=3",
        "--config.recipes=('relu_p4_bauto', 'relu_p4_b0', 'relu_p2_b0', 'relu_p1_over_L')",
        "--config.ablation_heads=(1, 3)",
        "--config.ablation_draws=1",
        "--config.ablation_n=4",
        "--config.top_heads=4",
    ]


@pytest.fixture(scope="session")
def run_audit(audit_arguments: list[str]) -> Command:
    """`run_audit(workdir, *overrides)`: the audit of `audit_arguments`, in this process."""

    def command(workdir: Path, *overrides: str) -> Outcome:
        return run_study(audit.STUDY, [*audit_arguments, f"--workdir={workdir}", *overrides])

    return command


@pytest.fixture(scope="session")
def audited(run_audit: Command, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a finished audit; nobody writes there."""
    folder = tmp_path_factory.mktemp("audits") / "finished"
    outcome = run_audit(folder)
    assert outcome.code == 0, outcome.err
    return folder


@pytest.fixture(scope="session")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Prompts of a user that the tiny model can answer: a needle, asked for at the end."""
    path = tmp_path_factory.mktemp("prompts") / "mine.jsonl"
    rows = [
        {"id": noun, "prompt": f"The secret word is {noun}. {often}. The secret word is"}
        | {"answer": f" {noun}"}
        for noun, often in zip(
            suites.shipped_nouns()[:9], itertools.cycle(["People sing", "Some wait"]), strict=False
        )
    ]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


@pytest.fixture(scope="session")
def questions_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Questions of random words with two choices, in the form of TruthfulQA's MC1."""
    rng, lines = np.random.default_rng(0), []
    for _ in range(QUESTIONS):
        one, two, three = (" ".join(rng.choice(PROSE, 3)) for _ in range(3))
        answers = {"choices": [two, three], "labels": [1, 0]}
        lines.append(json.dumps({"question": one, "mc1_targets": answers}))
    path = tmp_path_factory.mktemp("questions") / "mc.jsonl"
    path.write_text("\n".join(lines), "utf-8")
    return path


@pytest.fixture(scope="session")
def texts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three texts, the last of which is longer than is read."""
    rng = np.random.default_rng(0)
    path = tmp_path_factory.mktemp("texts") / "mine.jsonl"
    rows = [
        {"id": f"text {n}", "text": " ".join(rng.choice(PROSE, n))}
        for n in (TEXT_LENGTH, 29, TEXT_LENGTH + 7)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), "utf-8")
    return path


@pytest.fixture(scope="session")
def asked(
    run_audit: Command,
    prompts_file: Path,
    texts_file: Path,
    questions_file: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, AuditSummary, str]:
    """Folder, summary and output of an audit of all that can be asked for besides.

    Prompts, texts and questions of a user; named suites, of a length that is compiled already.
    """
    folder = tmp_path_factory.mktemp("asked") / "run"
    recipes = ("relu_p4_bauto", "relu_p4_b0", "relu_p2_b0", "relu_p1_over_L", HOPELESS)
    outcome = run_audit(
        folder,
        f"--config.recipes={recipes}",
        f"--config.prompts={prompts_file}",
        *(f"--config.text={texts_file}", f"--config.text_length={TEXT_LENGTH}"),
        *(f"--config.truthfulqa={questions_file}", "--config.choices_n=0"),
        *(f"--config.suites={SUITES}", "--config.suite_n=5"),
        *("--config.suite_recipes=('relu_p4_b0',)", "--config.single_heads=2"),
        "--config.ablation_suites=('decoys',)",
    )
    assert outcome.code == 0, outcome.err
    return folder, load_result(folder / "summary.json", AuditSummary), outcome.out


@pytest.fixture(scope="session")
def run_check(tiny: Path, haystack: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """`run_check(*flags)`: a check of the tiny model in a new folder, in this process."""
    flags = [f"--haystack={haystack}", "--length=64", "--n=7"]

    def command(*argv: str, model: Path = tiny) -> Outcome:
        workdir = f"--workdir={tmp_path_factory.mktemp('checks') / 'run'}"
        return run_study(check.STUDY, [f"--model={model}", *flags, workdir, *argv])

    return command


@pytest.fixture(scope="session")
def toy(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """`toy(name)`: for files of configs/polyattn/ a model of their family, and one more.

    They are random but for SmolLM2's, which the others have.

    The golden models of the converters give the architecture, wider weights scores of order one.
    """
    tokenizer = tiny_tokenizer()
    goldens = {
        "gemma3_270m.py": "gemma3",
        "llama32_1b.py": "llama_gqa",
        "pythia_1_4b.py": "neox",
        "gpt2": "gpt2",
        "gemma4_e2b.py": "gemma4",
        "qwen3_1_7b.py": "qwen3",
    }
    rng = np.random.default_rng(0)

    def moved(path: Any, a: jax.Array) -> Any:
        # biases start at 0, where leaving one out would change nothing
        if "bias" in jax.tree_util.keystr(path[-1:]):
            return a + rng.normal(scale=0.1, size=a.shape).astype(np.float32)
        return 6.0 * a if a.ndim > 2 else a

    @functools.cache
    def toy(name: str) -> Path:
        if name not in goldens:
            return tiny
        cfg = dataclasses.replace(
            lm_jax.load_pretrained(ROOT / "tests" / "golden" / goldens[name]).cfg,
            vocab_size=tokenizer.vocab_size,
            max_length=256,
        )
        params = drawn(cfg)
        blocks = jax.tree_util.tree_map_with_path(moved, params["blocks"])
        folder = tmp_path_factory.mktemp("toys") / goldens[name]
        lm_jax.save_pretrained(folder, cfg, params | {"blocks": blocks}, tokenizer)
        return folder

    return toy


@pytest.fixture(scope="session")
def run_smoke(haystack: Path) -> Command:
    """`run_smoke(name, model, workdir)`: the smoke mode of a file in configs/polyattn/."""

    def command(name: str, model: Path, workdir: Path) -> Outcome:
        path = ROOT / "configs" / "polyattn" / name
        flags = [f"--config.model={model}", f"--config.haystack={haystack}"]
        argv = [f"--config={path}:smoke", *flags, f"--workdir={workdir}"]
        return run_study(audit.STUDY, argv)

    return command


@pytest.fixture(scope="module")
def finding() -> tuple[AuditSummary, Any, Any]:
    """Summary, rows and heads of the audit that `made_report` makes."""
    return synthetic_report.audit()
