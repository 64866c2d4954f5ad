"""Files of the Hugging Face hub, by repository, commit and path, which `fetch` asks for first.

Only public files are read, without an account. `HF_ENDPOINT` names another hub, and nothing is
asked of any where `HF_HUB_OFFLINE` is set. The recorded sha256 decides whether a file is taken, as
of one from a package index.
"""

import os
from pathlib import Path
import urllib.parse

from lm_jax.assets import transfer
from lm_jax.assets.manifest import HubFile, Member
from lm_jax.run.files import file_digest

_HUB = "https://huggingface.co"
# A network without a way to the hub, as that of a firewall, costs this once for an asset.
_TIMEOUT_S = 5.0


class NotTakenError(Exception):
    """A file that the hub did not give, with the reason."""


def is_asked() -> bool:
    """Whether the hub may be asked."""
    return os.environ.get("HF_HUB_OFFLINE", "").upper() not in ("1", "ON", "YES", "TRUE")


def address(file: HubFile) -> str:
    """Where a file of the hub is downloaded from."""
    hub = (os.environ.get("HF_ENDPOINT") or _HUB).rstrip("/")
    return f"{hub}/{file.repository}/resolve/{file.revision}/{urllib.parse.quote(file.path)}"


def take(member: Member, file: HubFile, folder: Path, scratch: Path, *, progress: bool) -> None:
    """Puts a file of the hub in place of one out of a wheel.

    Args:
      member: member of an asset.
      file: file of the hub with the same bytes.
      folder: folder of the asset.
      scratch: folder for what has not arrived whole, on the same disk.
      progress: whether to print how far the download is.

    Raises:
      NotTakenError: the hub cannot be reached, has no such file, or has other bytes.
      OSError: the file cannot be written.
    """
    arrived, url = scratch / member.sha256, address(file)
    scratch.mkdir(exist_ok=True)
    try:
        with transfer.progress_of(member.local, member.size, shown=progress) as report:
            transfer.save(url, arrived, report, timeout_s=_TIMEOUT_S, tries=1)
    except transfer.TransferError as error:
        raise NotTakenError(str(error)) from error
    if file_digest(arrived)["sha256"] != member.sha256:
        arrived.unlink()
        raise NotTakenError(f"{url}: its sha256 is not that of the manifest")
    target = folder / member.local
    target.parent.mkdir(parents=True, exist_ok=True)
    arrived.replace(target)
