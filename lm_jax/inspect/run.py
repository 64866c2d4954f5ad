"""One forward pass over texts, and the questions that a notebook asks of it.

    run = model.run("The capital of France is")
    run.top(3)                                  # [(' Paris', 0.77), ...]
    run.cache["attn.pattern"][7, 0, 3]          # or "blocks.7.attn.hook_pattern"

A site that was not recorded in the first pass is recorded in another one, with the same edits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
import dataclasses
import functools
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from lm_jax.errors import UsageError
from lm_jax.inspect import interventions, names
from lm_jax.inspect.attribution import Attribution, direct_logit_attribution
from lm_jax.model import layers, sites
from lm_jax.model.attention import as_pytree, softmax
from lm_jax.model.config import DecoderConfig
from lm_jax.model.decoder import Output, forward
from lm_jax.model.mixers import ATTENTION, Mixer
from lm_jax.model.precision import exact_jit
from lm_jax.text.tokenizer import Tokenizer

Token = str | int
Top = list[tuple[str, float]]


class Lens(Protocol):
    """What makes of the stream that leaves a layer the one that leaves the last."""

    @property
    def layers(self) -> int:
        """The number of the model's layers."""
        ...

    def transport(self, h: jax.Array, layer: int) -> jax.Array:
        """The stream `[..., D]` that leaves the last layer, of that which leaves `layer`."""
        ...


@dataclasses.dataclass(frozen=True)
class Subject:
    """What a run is of: parameters, configuration, tokenizer, attend and mixer."""

    params: Any
    cfg: DecoderConfig
    tokenizer: Tokenizer | None
    attend: Any = softmax
    mixer: Mixer = ATTENTION


def run(
    subject: Subject,
    text: Any,
    *,
    record: Sequence[str] | Mapping[str, sites.Reducer] = (),
    edits: Any = None,
) -> "Run":
    """Runs a model on a text, on ids, or on several of either.

    Args:
      subject: the model.
      text: a text, token ids `[T]`, or a list of several, which may differ in length.
      record: names of sites in either style (`names.site`), or reducers by name.
      edits: edits by site in either style, or several of them (`interventions.by_site`).

    Raises:
      UsageError: text and no tokenizer, ids outside of the vocabulary, more tokens than the model
        has positions for, or a site, layer or head that does not exist.
      BadInputError: a text holds a lone surrogate.
    """
    ids, single = _ids(subject, text)
    if isinstance(record, str):
        record = [record]
    if not isinstance(record, Mapping):
        record = dict.fromkeys(record, sites.keep)
    reducers = {names.site(name).site: reducer for name, reducer in record.items()}
    batch = Batch(subject, ids, interventions.by_site(edits, subject.cfg))
    output = batch.forward(reducers)
    whole = {site for site, reducer in reducers.items() if reducer is sites.keep}
    return Run(
        batch,
        single,
        output.logits,
        {site: value for site, value in output.records.items() if site in whole},
        {site: value for site, value in output.records.items() if site not in whole},
    )


@dataclasses.dataclass(frozen=True)
class Batch:
    """B texts to one model, which a forward pass reads together.

    Attributes:
      subject: the model.
      ids: token ids of each text.
      edits: edits by site, as `forward` takes them.
    """

    subject: Subject
    ids: tuple[tuple[int, ...], ...]
    edits: Mapping[str, Any]

    @property
    def tokens_BT(self) -> jax.Array:
        """Ids `[B, T]`, padded on the right with token 0."""
        longest = max(map(len, self.ids))
        return jnp.array([(*row, *[0] * (longest - len(row))) for row in self.ids], jnp.int32)

    @property
    def valid_BT(self) -> jax.Array | None:
        """Whether a token is one of its text; None where all texts are equally long."""
        lengths_B = np.array([len(row) for row in self.ids])
        if (lengths_B == lengths_B[0]).all():
            return None
        return jnp.arange(lengths_B.max())[None] < lengths_B[:, None]

    def forward(self, record: Mapping[str, sites.Reducer]) -> Output:
        """One forward pass that records sites."""
        return _forward(
            self.subject.params,
            self.tokens_BT,
            self.edits,
            as_pytree(self.subject.attend),
            self.valid_BT,
            cfg=self.subject.cfg,
            mixer=self.subject.mixer,
            record=tuple(record.items()),
        )


@dataclasses.dataclass(frozen=True, repr=False)
class Run:
    """A forward pass over B texts; where one text was given, answers are of it alone.

    Attributes:
      batch: the model and its texts.
      single: whether one text was given, and no list of texts.
      logits: logits `[B, T, V]` in float32; beyond the end of a shorter text they mean nothing.
      sites: recorded sites by our names.
      reduced: what reducers made of a site, by its name.
    """

    batch: Batch
    single: bool
    logits: jax.Array
    sites: dict[str, Any]
    reduced: dict[str, Any]

    @property
    def subject(self) -> Subject:
        """The model."""
        return self.batch.subject

    @property
    def ids(self) -> tuple[tuple[int, ...], ...]:
        """Token ids of each text."""
        return self.batch.ids

    @property
    def cache(self) -> "Recorded":
        """Values of sites by name: `["attn.pattern"]` or `["blocks.7.attn.hook_pattern"]`."""
        return Recorded(self)

    def whole(self, site: str) -> jax.Array:
        """All values of a site, which is recorded now where it is not yet."""
        if site not in self.sites:
            self.sites[site] = self.batch.forward({site: sites.keep}).records[site]
        return self.sites[site]

    @property
    def tokens(self) -> list[str] | list[list[str]]:
        """The tokens as text."""
        return self._answer([[self._text(i) for i in row] for row in self.ids])

    @property
    def loss(self) -> float:
        """Mean of -log p of each token but the first of its text, in nats.

        Raises:
          UsageError: no text has two tokens.
        """
        if all(len(row) < 2 for row in self.ids):
            raise UsageError("loss: no text has two tokens, so none is predicted")
        tokens_BT, valid_BT = self.batch.tokens_BT, self.batch.valid_BT
        log_p = jax.nn.log_softmax(self.logits[:, :-1], axis=-1)
        loss_BT = -jnp.take_along_axis(log_p, tokens_BT[:, 1:, None], axis=-1)[..., 0]
        return float(jnp.mean(loss_BT, where=None if valid_BT is None else valid_BT[:, 1:]))

    def top(self, k: int = 5, *, at: int = -1) -> Any:
        """The k most probable next tokens with their probabilities.

        Args:
          k: number of tokens.
          at: position, counted from the end where negative.
        """
        return self._answer([self._top(row_V, k) for row_V in self._at(self.logits, at)])

    def logit_diff(self, answer: Token, other: Token, *, at: int = -1) -> Any:
        """The logit of one token minus that of another.

        Args:
          answer: the token, as a text of exactly one token or an id.
          other: the token to compare with.
          at: position, counted from the end where negative.

        Raises:
          UsageError: a text is not one token.
        """
        a, b = self.token_id(answer), self.token_id(other)
        return self._answer([float(x[a] - x[b]) for x in self._at(self.logits, at)])

    def logit_lens(self, k: int = 1, *, at: int = -1, lens: Lens | None = None) -> Any:
        """The k most probable tokens by the residual stream that leaves each layer.

        The last norm and the unembedding read the stream of every layer (nostalgebraist 2020), or
        what a lens makes of it; what the run edits behind the last layer is left out.

        Args:
          k: number of tokens.
          at: position, counted from the end where negative.
          lens: a lens of this model (`inspect.jacobian_lens`); None for the stream as it is.

        Returns:
          Lists by layer, as of `top`.
        """
        at_B = self._positions(at)
        x_LBD = self.whole("resid_post")[:, jnp.arange(len(at_B)), at_B]
        if lens is not None:
            if lens.layers != len(x_LBD):
                raise UsageError(
                    f"lens: of {lens.layers} layers, and the model has {len(x_LBD)}; give the lens "
                    "of this model"
                )
            x_LBD = jnp.stack([lens.transport(x_BD, layer) for layer, x_BD in enumerate(x_LBD)])
        logits_LBV = np.asarray(_lens(self.subject.params, x_LBD, cfg=self.subject.cfg))
        by_text = logits_LBV.swapaxes(0, 1)
        return self._answer([[self._top(x_V, k) for x_V in of_text] for of_text in by_text])

    def attribution(self, answer: Token, other: Token, *, at: int = -1) -> Attribution:
        """What each component adds to the logit difference by itself (direct logit attribution).

        Args:
          answer: the token, as of `logit_diff`.
          other: the token to compare with.
          at: position, counted from the end where negative.
        """
        return direct_logit_attribution(
            self.subject.params,
            self.batch.tokens_BT,
            self.subject.cfg,
            self._positions(at),
            jnp.array([self.token_id(answer), self.token_id(other)]),
            edits=self.batch.edits,
            attend=as_pytree(self.subject.attend),
            mixer=self.subject.mixer,
            valid_BT=self.batch.valid_BT,
        )

    def token_id(self, token: Token) -> int:
        """The id of a text of exactly one token; an id as it is.

        Raises:
          UsageError: the text is not one token, or the id is outside of the vocabulary.
        """
        if isinstance(token, str):
            encode = functools.partial(_tokenizer(self.subject).encode, add_special_tokens=False)
            ids = encode(token)
            # SentencePiece puts a space of its own in front.
            bare = encode(token.removeprefix(" ")) if len(ids) != 1 else ids
            if len(bare) == 1 and self._text(bare[0]) == token:
                ids = bare
            if len(ids) != 1:
                parts = [self._text(i) for i in ids]
                raise UsageError(
                    f"{token!r} is {len(ids)} tokens {parts}; give a text of one token, with its "
                    "space in front where it is a word inside of a text, or an id"
                )
            return ids[0]
        if not 0 <= token < self.subject.cfg.vocab_size:
            raise UsageError(f"id {token} is outside of 0..{self.subject.cfg.vocab_size - 1}")
        return int(token)

    def __repr__(self) -> str:
        """The number of texts and tokens, and the answer."""
        tokens = sum(map(len, self.ids))
        said = f"{tokens} tokens" if self.single else f"{len(self.ids)} texts, {tokens} tokens"
        if not self.single or self.subject.tokenizer is None:
            return f"Run({said})"
        best = ", ".join(f"{token!r} {p:.1%}" for token, p in self.top(3))
        return f"Run({said}; next: {best})"

    def _positions(self, at: int) -> jax.Array:
        """The position `at` of each text, `[B]`."""
        for row in self.ids:
            if not -len(row) <= at < len(row):
                raise UsageError(f"at = {at} is outside of a text of {len(row)} tokens")
        return jnp.array([at % len(row) for row in self.ids])

    def _at(self, x_BTV: jax.Array, at: int) -> np.ndarray:
        at_B = self._positions(at)
        return np.asarray(x_BTV[jnp.arange(len(at_B)), at_B])

    def _top(self, logits_V: np.ndarray, k: int) -> Top:
        if not 1 <= k <= len(logits_V):
            raise UsageError(f"k = {k} is outside of 1..{len(logits_V)}")
        p, ids = jax.lax.top_k(jax.nn.softmax(logits_V), k)
        return [(self._text(i), x) for i, x in zip(ids.tolist(), p.tolist(), strict=True)]

    def _text(self, i: int) -> str:
        tokenizer = _tokenizer(self.subject)
        # A model may have more rows than its tokenizer has tokens.
        return tokenizer.piece(i) if i < tokenizer.vocab_size else f"<{i}>"

    def _answer(self, by_text: list[Any]) -> Any:
        return by_text[0] if self.single else by_text


class Recorded(Mapping[str, jax.Array]):
    """Recorded sites of a run by name of either style; one that is not recorded yet is then."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def __getitem__(self, name: str) -> jax.Array:
        place = names.site(name)
        run = self._run
        value = run.reduced[place.site] if place.site in run.reduced else run.whole(place.site)
        if place.layer is None:
            return value
        if place.layer >= len(value):
            raise UsageError(f"{name!r}: the model has layers 0..{len(value) - 1}")
        return value[place.layer]

    def __iter__(self) -> Iterator[str]:
        return iter({**self._run.sites, **self._run.reduced})

    def __len__(self) -> int:
        return len({**self._run.sites, **self._run.reduced})


def final_norm(params: Any, x_BTD: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """The last norm of a model on a residual stream `[B, T, D]`."""
    return layers.norm(params.get("final", {}), x_BTD, cfg, sites.Scope({}, {}), "final")


def logit_lens(params: Any, x_BTD: jax.Array, cfg: DecoderConfig) -> jax.Array:
    """Logits `[B, T, V]` that the last norm and the unembedding read in a residual stream."""
    return layers.unembed(params, final_norm(params, x_BTD, cfg), cfg)


_lens = exact_jit(logit_lens, static_argnames="cfg")


@functools.partial(exact_jit, static_argnames=("cfg", "mixer", "record"))
def _forward(
    params: Any,
    tokens_BT: jax.Array,
    edits: Any,
    attend: Any,
    valid_BT: jax.Array | None,
    *,
    cfg: DecoderConfig,
    mixer: Mixer,
    record: tuple[tuple[str, Callable[[jax.Array], Any]], ...],
) -> Output:
    return forward(
        params,
        tokens_BT,
        cfg,
        edits=edits,
        record=dict(record),
        attend=attend,
        mixer=mixer,
        valid_BT=valid_BT,
    )


def _tokenizer(subject: Subject) -> Tokenizer:
    if subject.tokenizer is None:
        raise UsageError("this model has no tokenizer; give token ids in place of text")
    return subject.tokenizer


def _ids(subject: Subject, text: Any) -> tuple[tuple[tuple[int, ...], ...], bool]:
    """Ids of each text, and whether one text was given alone."""
    if isinstance(text, str):
        several, single = [text], True
    else:
        if np.ndim(text) == 0:
            raise UsageError(f"text: expected a text, token ids [T] or a list, got {text!r}")
        several = list(text)
        single = bool(several) and np.ndim(several[0]) == 0 and not isinstance(several[0], str)
        several = [several] if single else several
    rows = []
    for each in several:
        if isinstance(each, str):
            ids = _tokenizer(subject).encode(each)
        else:
            found = np.asarray(each)
            if found.ndim != 1 or not (np.issubdtype(found.dtype, np.integer) or not found.size):
                raise UsageError(
                    f"text: expected a text or token ids [T], got {found.dtype} of shape "
                    f"{found.shape}"
                )
            ids = found.tolist()
        rows.append(tuple(ids))
    if not rows:
        raise UsageError("text: give at least one text")
    limit, size = subject.cfg.max_length, subject.cfg.vocab_size
    for row in rows:
        if not row:
            raise UsageError("text: a text has no tokens")
        if len(row) > limit and not subject.mixer.recurrent:
            raise UsageError(f"text: {len(row)} tokens; the model reads at most {limit}")
        if not 0 <= min(row) <= max(row) < size:
            raise UsageError(f"text: an id is outside of the vocabulary, 0..{size - 1}")
    return tuple(rows), single
