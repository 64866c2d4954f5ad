"""The marker of a finished run, and the inputs that its results were made from.

    finished.json     when the run finished, its inputs, and of a study the fingerprint of its
                      settings and inputs; written after everything else

A command names its inputs both where it asks whether a run has finished and where it marks it: a
model that was changed in place is refused, and never answered with the numbers of the earlier one.
"""

from collections.abc import Mapping
import os
from pathlib import Path

from lm_jax.errors import BadInputError, CorruptError
from lm_jax.run import processes
from lm_jax.run.files import content_digest, file_digest, read_json, write_json
from lm_jax.run.identity import ModelIdentity, difference
from lm_jax.run.provenance import PROVENANCE_FILE, read_provenance, utc_now
from lm_jax.run.workdir import FINISHED_FILE

# By name: of a model `ModelIdentity.text`, of a file its digest.
Inputs = Mapping[str, str]
# Of a command whose settings decide everything.
NO_INPUTS: Inputs = {}


class OtherInputsError(BadInputError):
    """A finished run was made from other inputs than those that are named now."""


def mark_finished(folder: Path, inputs: Inputs, fingerprint: str | None = None) -> None:
    """Writes the marker of a finished run; call it when every other file is written.

    Args:
      folder: work folder of the run.
      inputs: what it was made from.
      fingerprint: hash of what decides its results, for a folder without a config of its own.
    """
    made_from = {"inputs": dict(inputs)} | ({"fingerprint": fingerprint} if fingerprint else {})
    write_json(folder / FINISHED_FILE, {"finished": utc_now()} | made_from)


def is_finished(folder: str | os.PathLike[str]) -> bool:
    """Whether the run in `folder` has finished, whatever it was made from."""
    return (Path(folder) / FINISHED_FILE).exists()


def finish_time(
    folder: str | os.PathLike[str], inputs: Inputs, fingerprint: str | None = None
) -> str | None:
    """Returns when (ISO 8601, UTC) the run in `folder` finished, or None if it has not.

    One that finished with another fingerprint is of settings that were replaced by force, and has
    not finished. The marker of an earlier version has none.

    A run of an earlier version is compared with what its provenance says of the same names. An
    input that is no longer there, or that was not recorded, is not compared, which is said on the
    console.

    Raises:
      OtherInputsError: it finished with another model or another file.
      CorruptError: the marker is damaged.
    """
    folder = Path(folder)
    if not is_finished(folder):
        return None
    marker = read_json(folder / FINISHED_FILE)
    if not isinstance(marker, dict) or "finished" not in marker:
        raise CorruptError(
            f"{folder / FINISHED_FILE} does not say when the run finished; delete it, and the same "
            "command goes on"
        )
    if fingerprint and marker.get("fingerprint", fingerprint) != fingerprint:
        return None
    recorded = marker.get("inputs", _of_provenance(folder))
    check_inputs(folder, recorded, inputs)
    if unknown := [name for name in inputs if name not in recorded]:
        processes.note(
            f"{folder}: {', '.join(unknown)} cannot be compared, as the run did not record them"
        )
    if gone := [name for name in marker.get("inputs", ()) if name not in inputs]:
        processes.note(f"{folder}: {', '.join(gone)} cannot be compared, being no longer there")
    return marker["finished"]


def file_inputs(paths: Mapping[str, str | os.PathLike[str]]) -> dict[str, str]:
    """The digest of each file, or of all files in a folder, by the name of the input.

    What is not there is left out: a command that needs it refuses it, and one that needs it no
    longer, as text that is prepared, goes on.
    """
    return {name: _digest(Path(path)) for name, path in paths.items() if path and _is_there(path)}


def _is_there(path: str | os.PathLike[str]) -> bool:
    return Path(path).is_file() or Path(path).is_dir()


def _digest(path: Path) -> str:
    if path.is_file():
        return file_digest(path)["sha256"]
    files = sorted(each for each in path.rglob("*") if each.is_file())
    return content_digest({str(each.relative_to(path)): file_digest(each) for each in files})


def check_inputs(folder: Path, recorded: Inputs, inputs: Inputs) -> None:
    """Refuses the results of a folder where an input is not the one that they were made from.

    Args:
      folder: work folder of the finished run.
      recorded: inputs of that run; what it does not name is not compared.
      inputs: inputs of the command now.

    Raises:
      OtherInputsError: naming the inputs, and what of a model differs.
    """
    changes = [
        f"{name}: {change}"
        for name, now in inputs.items()
        if name in recorded and (change := _change(recorded[name], now, f"{folder}: {name}"))
    ]
    if changes:
        raise OtherInputsError(
            f"{folder} holds the results of other inputs ({'; '.join(changes)}); put those back, "
            "or choose another --workdir"
        )


def check_resumed(folder: Path, inputs: Inputs) -> None:
    """Refuses to go on with a run that was begun with other inputs than those of now.

    Raises:
      OtherInputsError: naming the inputs, and what of a model differs.
    """
    check_inputs(folder, _of_provenance(folder), inputs)


def _change(recorded: str, now: str, where: str) -> str:
    """How an input differs, in words; "" if it does not. A file has no parts."""
    if ModelIdentity.parse(now).config is None and recorded != now:
        return f"content {recorded[:12]}, not {now[:12]}"
    return difference(recorded, now, where=where)


def _of_provenance(folder: Path) -> Inputs:
    """What the starts of a run were given; a later one where they differ."""
    if not (folder / PROVENANCE_FILE).is_file():
        return {}
    stored = read_provenance(folder)
    # A start may lack an input, such as text that it had prepared before.
    return {
        name: value for start in (stored, *stored.restarts) for name, value in start.data.items()
    }
