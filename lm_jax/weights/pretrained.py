"""A pretrained model, loaded or opened."""

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from lm_jax.errors import UsageError
from lm_jax.inspect.run import Run, Subject
from lm_jax.inspect.run import run as run_subject
from lm_jax.model.attention import softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.sites import Reducer
from lm_jax.run.identity import ModelIdentity
from lm_jax.text.tokenizer import Tokenizer
from lm_jax.weights.identity import identify, weights_digest


@dataclasses.dataclass(frozen=True)
class Pretrained:
    """A loaded model; `tokenizer` is None where the folder has none, `files` hold the weights.

    `revision` is the commit of a snapshot of the Hugging Face hub, None for any other source;
    `others` is what else decides its forward pass, of which its identity is too (`identify`): the
    settings of adapters that were merged in, and gates. `of_run` is the identity of a trained run,
    which has no such files.
    """

    cfg: DecoderConfig
    params: dict[str, Any]
    tokenizer: Tokenizer | None
    files: tuple[Path, ...]
    revision: str | None = None
    others: tuple[Any, ...] = ()
    of_run: ModelIdentity | None = None

    def __repr__(self) -> str:
        """Family and sizes, without the weights."""
        count = sum(leaf.size for leaf in jax.tree.leaves(self.params))
        return (
            f"Pretrained({self.cfg.family}: {self.cfg.sizes}, {self.cfg.num_heads} heads a layer; "
            f"{count:,} parameters)"
        )

    def run(
        self,
        text: Any,
        *,
        record: Sequence[str] | Mapping[str, Reducer] = (),
        edits: Any = None,
        attend: Any = softmax,
    ) -> Run:
        """Runs the model on a text, on ids, or on a list of either (`lm_jax.inspect.run`).

        Args:
          text: a text, token ids `[T]`, or a list of several, which may differ in length.
          record: names of sites to record in the same pass, such as `attn.pattern` or
            `blocks.7.attn.hook_pattern`; others are recorded when `Run.cache` is asked for them.
          edits: what `lm_jax.ablate`, `patch` or `steer` return, edits by site, or a list of them.
          attend: the row map, softmax by default.

        Raises:
          UsageError: the text does not fit the model, or a site, layer or head does not exist.
          BadInputError: the text holds a lone surrogate.
        """
        subject = Subject(self.params, self.cfg, self.tokenizer, attend)
        return run_subject(subject, text, record=record, edits=edits)

    @functools.cached_property
    def sha256(self) -> str:
        """Digest over the weight files, in order of their names."""
        return weights_digest(self.files)

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """Digests of weights, configuration, tokenizer and chat template; what a result is of."""
        return self.of_run or identify(self.cfg, self.tokenizer, self.sha256, *self.others)


@dataclasses.dataclass(frozen=True)
class OpenedModel:
    """A model whose config and tokenizer are read and whose weights are not; `files` hold those.

    `read_params` takes the dtype and mesh of `load` and reads the parameters; `revision` and
    `others` are as of `Pretrained`.
    """

    cfg: DecoderConfig
    tokenizer: Tokenizer | None
    files: tuple[Path, ...]
    read_params: Callable[..., dict[str, Any]]
    revision: str | None = None
    others: tuple[Any, ...] = ()

    def load(
        self, *, dtype: Any = jnp.float32, mesh: jax.sharding.Mesh | None = None
    ) -> Pretrained:
        """Reads the weights; arguments and errors as of `load_pretrained`."""
        if jnp.dtype(dtype) not in (jnp.float32, jnp.bfloat16):
            raise UsageError(
                f"dtype = {jnp.dtype(dtype)} is not supported; give float32 or bfloat16"
            )
        params = self.read_params(dtype=dtype, mesh=mesh)
        rest = self.tokenizer, self.files, self.revision, self.others
        return Pretrained(self.cfg, params, *rest)

    @functools.cached_property
    def identity(self) -> ModelIdentity:
        """The identity of `Pretrained`, from the files of the weights; no array is made."""
        return identify(self.cfg, self.tokenizer, weights_digest(self.files), *self.others)
