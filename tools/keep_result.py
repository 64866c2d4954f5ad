"""Keeps what a run measured in results/, where the pages take their numbers from.

    python -m tools.keep_result runs/circuits circuits/ioi --title "IOI in the pair" \\
        --minutes 35 --device "two CPU cores" --rows rows.parquet
    python -m tools.keep_result results/pair/pair_192        write its digests anew

Copies `summary.json` (or the file that `--summary` names, under that name), `provenance.json` and
the named rows into `results/STUDY/NAME` and writes `result.toml` with their digests and the command
of `provenance.json`. A tolerance is added to that
file by hand, with its reason.
"""

import argparse
from collections.abc import Mapping, Sequence
import json
from pathlib import Path
import re
import shutil
import sys

from iaj.parser import Parser, run_parsed
from lm_jax.errors import BadInputError, UsageError
from lm_jax.run.files import file_digest, read_json, write_json, write_text
from lm_jax.run.provenance import PROVENANCE_FILE, read_provenance
from lm_jax.run.stored_results import RESULT_FILE, SUMMARY_FILE, load_stored

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"


def digests(folder: Path, names: list[str]) -> dict[str, str]:
    """The sha256 of files by name.

    Raises:
      BadInputError: a file is missing.
    """
    if missing := [name for name in names if not (folder / name).is_file()]:
        raise BadInputError(f"{folder} has no {', '.join(missing)}; is its run finished?")
    return {name: file_digest(folder / name)["sha256"] for name in names}


def files_section(files: Mapping[str, str]) -> str:
    """The section `[files]` of a `result.toml`."""
    lines = (f"{json.dumps(name)} = {json.dumps(digest)}" for name, digest in files.items())
    return "[files]\n" + "\n".join(lines) + "\n"


def refresh(folder: Path) -> None:
    """Writes the digests of a result in results/ anew, and nothing else of its `result.toml`."""
    result = load_stored(RESULTS, folder.resolve().relative_to(RESULTS).as_posix())
    section = files_section(digests(result.folder, list(result.description.files)))
    text = (folder / RESULT_FILE).read_text("utf-8")
    new, count = re.subn(r"^\[files\]\n(?:[^\[\n].*\n)*", section, text, flags=re.MULTILINE)
    if count != 1:
        raise BadInputError(f"{folder / RESULT_FILE} has no section [files] to write anew")
    write_text(folder / RESULT_FILE, new)


def keep(
    run: Path,
    name: str,
    *,
    title: str,
    minutes: float,
    device: str,
    rows: list[str],
    summary: str = SUMMARY_FILE,
    parts: Sequence[str] = (),
) -> Path:
    """Copies a finished run's files into results/ and describes them; returns the folder.

    Args:
      run: work folder of the run.
      name: name of the result, STUDY/NAME.
      title: what was measured, in one line.
      minutes: minutes that the command took.
      device: machine that it took them on, in words.
      rows: further files of the run to keep.
      summary: file of the run that is kept as `summary.json`.
      parts: entries of that file that are kept; all where none is named.

    Raises:
      BadInputError: a file, or one of the parts, is missing.
    """
    files = [SUMMARY_FILE, PROVENANCE_FILE, *rows]
    digests(run, [summary, PROVENANCE_FILE, *rows])
    whole = read_json(run / summary) if parts else {}
    if missing := [name for name in parts if name not in whole]:
        raise BadInputError(f"{run / summary} has no {', '.join(missing)}; name what it has")
    command = re.sub(
        r"^python -m (\S+?)(?:\.__main__)? ", r"python -m \1 ", read_provenance(run).command
    )
    command = re.sub(r" --resume(?:=\S+)?(?= |$)", "", command)
    command, count = re.subn(r"--workdir[= ]\S+", "--workdir={workdir}", command)
    if not count:
        command += " --workdir={workdir}"
    folder = RESULTS / name
    folder.mkdir(parents=True, exist_ok=True)
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run / (summary if file == SUMMARY_FILE else file), folder / file)
    text = (
        f"title = {json.dumps(title, ensure_ascii=False)}\n\n[reproduce]\n"
        f"command = {json.dumps(command)}\nminutes = {minutes:g}\ndevice = {json.dumps(device)}\n"
    )
    if parts:
        write_json(folder / SUMMARY_FILE, {name: whole[name] for name in parts})
        text += f"parts = {json.dumps(list(parts))}\n"
    text += f"summary = {json.dumps(summary)}\n\n" if summary != SUMMARY_FILE else "\n"
    tolerances = "".join(f"{each}\n\n" for each in _tolerances(folder / RESULT_FILE))
    write_text(folder / RESULT_FILE, text + tolerances + files_section(digests(folder, files)))
    return folder


def _tolerances(file: Path) -> list[str]:
    """The sections `[[tolerance]]` that a result has already, as they were written by hand."""
    if not file.exists():
        return []
    sections = re.split(r"\n(?=\[)", file.read_text("utf-8"))
    return [each.strip() for each in sections if each.startswith("[[tolerance]]")]


def main(argv: list[str] | None = None) -> int:
    """Runs the command."""
    parser = Parser("python -m tools.keep_result", __doc__)
    parser.add_argument(
        "run", type=Path, help="work folder of a finished run, or a folder of results/"
    )
    parser.add_argument("name", nargs="?", help="name of the result, STUDY/NAME")
    parser.add_argument("--title", help="what was measured, in one line")
    parser.add_argument("--minutes", type=float, help="minutes that the command took")
    parser.add_argument("--device", help='machine that it took them on, such as "two CPU cores"')
    parser.add_argument(
        "--summary", default=SUMMARY_FILE, help="file of the run that has its numbers"
    )
    parser.add_argument(
        "--parts", nargs="*", default=[], help="entries of that file to keep, where it is large"
    )
    parser.add_argument("--rows", nargs="*", default=[], help="further files of the run to keep")
    return run_parsed(_run, parser, argv)


def _run(arguments: argparse.Namespace) -> None:
    if arguments.name is None:
        refresh(arguments.run)
        return
    needed = {
        "--title": arguments.title,
        "--minutes": arguments.minutes,
        "--device": arguments.device,
    }
    if missing := [flag for flag, value in needed.items() if value is None]:
        raise UsageError(f"a new result needs {', '.join(missing)}")
    folder = keep(
        arguments.run,
        arguments.name,
        title=arguments.title,
        minutes=arguments.minutes,
        device=arguments.device,
        rows=arguments.rows,
        summary=arguments.summary,
        parts=arguments.parts,
    )
    print(folder.relative_to(ROOT))


if __name__ == "__main__":
    sys.exit(main())
