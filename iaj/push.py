"""Uploads an exported model or transcoder to the Hugging Face hub, with a model card.

    iaj push models/speeches ORG/NAME --licence=apache-2.0 --dry_run
    iaj push models/speeches ORG/NAME --licence=apache-2.0 --private
    iaj push runs/posttrain/seed_0/target_2.9 ORG/NAME --licence=other --base_model=ORG/BASE
    iaj push pair_192_sparse_transcoder ORG/NAME

FOLDER is what `iaj protot export` wrote, an exported model of `iaj sparse posttrain` or `pair`, a
transcoder, a Hugging Face folder with safetensors, the work folder of a training that has one, or
the name of a published model. A training that has not finished is refused, and so is a folder
without safetensors. The card has YAML for the hub, and the folder's own numbers; nothing in the
folder is changed. `--dry_run` prints card and files and uploads nothing.

Log in with `hf auth login`, or set HF_TOKEN: the token is that of `huggingface_hub`.

Exit codes: 0 done, 2 usage, 3 the folder cannot be uploaded or the hub refused it, 7 a file of the
folder is damaged.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
import sys

from iaj import hub_card
from iaj.hub_card import HubModel
from iaj.parser import Parser, run_parsed
from lm_jax.assets import published
from lm_jax.errors import BadInputError, UsageError
from lm_jax.weights import card as cards
from lm_jax.weights import hub

_PUBLISHED_LICENCE = "apache-2.0"


def upload(model: HubModel, card: str, repository: str, *, private: bool) -> str:
    """Makes the repository if it is not there, and adds one commit; returns the commit's address.

    Args:
      model: folder and files.
      card: text of the card, with its front matter.
      repository: name of the repository, `ORG/NAME`.
      private: whether a new repository is private; one that is there stays as it is.

    Raises:
      BadInputError: the hub cannot be reached or refused it.
    """
    from huggingface_hub import CommitOperationAdd, HfApi
    from huggingface_hub.errors import HfHubHTTPError, HTTPError

    files: dict[str, bytes | Path] = {cards.CARD: card.encode()}
    files |= {name: model.folder / name for name in model.files}
    additions = [CommitOperationAdd(name, content) for name, content in files.items()]
    api = HfApi(library_name="interpretable-attention-jax")
    try:
        api.create_repo(repository, private=private, exist_ok=True)
        commit = api.create_commit(repository, additions, commit_message="Upload with iaj push")
    # A file that could not be sent is a RuntimeError of huggingface_hub.
    except (OSError, HTTPError, RuntimeError) as error:
        remedy = "check the network and HF_HUB_OFFLINE"
        if isinstance(error, HfHubHTTPError):
            remedy = "log in with hf auth login, and check that your token may write there"
        reason = " ".join(str(error).split()).rstrip(".")
        raise BadInputError(f"{repository} was not uploaded ({reason}); {remedy}") from error
    return commit.commit_url


def _licence(arguments: argparse.Namespace) -> str:
    if arguments.licence:
        return arguments.licence
    if arguments.folder in published.names():
        return _PUBLISHED_LICENCE
    raise UsageError(
        "--licence is missing; give the hub's name of the licence of these weights, such as "
        "apache-2.0, or other"
    )


def run(arguments: argparse.Namespace) -> None:
    """Uploads, or prints what would be uploaded, by the parsed arguments."""
    for flag, name in (("NAME", arguments.repository), ("--base_model", arguments.base_model)):
        if name is not None and ("@" in name or not hub.NAME.fullmatch(name)):
            raise UsageError(f"{flag} = {name!r} is no repository of the hub; write ORG/NAME")
    licence = _licence(arguments)
    model = hub_card.describe(arguments.folder)
    named = model.body.replace("ORG/NAME", arguments.repository)
    card = hub_card.front_matter(model, licence=licence, base_model=arguments.base_model) + named
    size = sum((model.folder / name).stat().st_size for name in model.files) + len(card.encode())
    about = f"{len(model.files) + 1} files, {size / 1e6:,.1f} MB"
    if arguments.dry_run:
        print(card)
        print("\n".join([cards.CARD, *model.files]))
        print(f"{about} of {model.folder}; nothing was uploaded (--dry_run)")
        return
    print(f"{upload(model, card, arguments.repository, private=arguments.private)}: {about}")


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code; an error is one line on standard error."""
    parser = Parser("iaj push", __doc__)
    parser.add_argument("folder", metavar="FOLDER", help="folder of the model, or a published name")
    parser.add_argument("repository", metavar="ORG/NAME", help="repository of the hub")
    parser.add_argument("--licence", metavar="ID", help="licence of the weights, as the hub has it")
    parser.add_argument("--base_model", metavar="ORG/NAME", help="model that it was made from")
    parser.add_argument("--private", action="store_true", help="make a new repository private")
    parser.add_argument("--dry_run", action="store_true", help="print the card and the files only")
    return run_parsed(run, parser, argv)


if __name__ == "__main__":
    sys.exit(main())
