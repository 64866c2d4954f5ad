"""Settings of an attribution: the frozen dataclass that its config file becomes."""

import dataclasses
import hashlib
from pathlib import Path
from typing import Annotated

from lm_jax.run.settings import Flag, at_least
from protot_jax.training.run_options import RunSettings, folder_beside

FOLDER = "attribution"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttributionConfig(RunSettings):
    """The prompt, the words whose logits are attributed, and how much is listed.

    Attributes:
      prompt: text whose next token is attributed.
      targets: words of one token whose logits are attributed; default the most probable tokens.
      top: how many of the most probable tokens, without --targets.
      pairs: how many of the strongest pairs of tokens to list.
    """

    prompt: Annotated[str, Flag()] = ""
    targets: Annotated[tuple[str, ...], Flag()] = ()
    top: Annotated[int, Flag(), at_least(1)] = 3
    pairs: Annotated[int, Flag(), at_least(1)] = 50

    def default_folder(self) -> Path:
        """A folder of the run for each prompt and its targets."""
        # Imported here, as pages load scipy, which `import protot_jax` does without.
        from lm_jax.report import slug

        # Prompts that differ in what a file name cannot hold have folders of their own.
        digest = hashlib.sha256(str([self.prompt, *self.targets]).encode()).hexdigest()[:8]
        return folder_beside(self.run, FOLDER, f"{slug(self.prompt)[:40]}-{digest}")


def smoke(config: AttributionConfig) -> AttributionConfig:
    """One target and its ten strongest pairs."""
    return dataclasses.replace(config, top=1, pairs=10)
