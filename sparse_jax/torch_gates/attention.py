"""The attention function that transformers calls, and the masks that it is given.

transformers passes an attention function the scaled and rotated queries, keys and values of a
layer, and a mask from the function of the same name; one without a function for masks gets none,
and would read the future.
"""

from collections.abc import Mapping
from typing import Any

from lm_jax.errors import UsageError
from lm_jax.weights.compat import transformers
from sparse_jax.torch_gates.gates import NAME, Layer, require_torch, widened

# Arguments that would change scores or keys, and come from no family that is exported.
_REFUSED = ("position_bias", "s_aux", "cache")


def register() -> None:
    """Tells transformers of the attention function "sparse_gates" and of its masks.

    It serves all models that are loaded with `attn_implementation="sparse_gates"`; each needs its
    own gates too (`load_gates`). To register twice changes nothing.

    Raises:
      UsageError: torch is not installed.
    """
    require_torch()
    library = transformers()
    library.AttentionInterface.register(NAME, attention)
    library.AttentionMaskInterface.register(NAME, mask)


def attention(
    module: Any,
    query_BNTH: Any,
    key_BKSH: Any,
    value_BKSH: Any,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    **options: Any,
) -> tuple[Any, Any]:
    """The output `[B, T, N, H]`, and the pattern with closed edges 0 in the dtype of the query."""
    torch = require_torch()
    layer = _layer(module, options)
    visible_B1TS = _visible(attention_mask, query_BNTH.shape[0])
    (N, H), K = query_BNTH.shape[1::2], key_BKSH.shape[1]
    # Under autocast products would be rounded, and scores decide which gates are open.
    with torch.autocast(query_BNTH.device.type, enabled=False):
        q_BKGTH = widened(query_BNTH).unflatten(1, (K, N // K))
        raw_BNTS = (q_BKGTH @ widened(key_BKSH)[:, :, None].mT).flatten(1, 2)
        score_BNTS = raw_BNTS * (H**-0.5 if scaling is None else scaling)
        if softcap is not None:
            score_BNTS = softcap * torch.tanh(score_BNTS / softcap)
        open_BNTS = layer.opened(raw_BNTS if layer.gates.raw_gate else score_BNTS, visible_B1TS)
        # Not -inf: the softmax of a row without a key would not be a number.
        lowest = torch.finfo(score_BNTS.dtype).min
        pattern_BNTS = score_BNTS.masked_fill(~visible_B1TS, lowest).softmax(-1)
        pattern_BNTS = layer.closed(pattern_BNTS, open_BNTS)
        kept_BNTS = torch.nn.functional.dropout(pattern_BNTS, dropout, module.training)
        kept_BKGTS = kept_BNTS.unflatten(1, (K, N // K))
        out_BNTH = (kept_BKGTS @ widened(value_BKSH)[:, :, None]).flatten(1, 2)
    out_BTNH = out_BNTH.transpose(1, 2).contiguous().to(value_BKSH.dtype)
    return out_BTNH, pattern_BNTS.to(query_BNTH.dtype)


def mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    *,
    attention_mask: Any = None,
    device: Any = "cpu",
    **options: Any,
) -> Any:
    """True where a query sees a key, `[B, 1, T, S]`; always made, and without queries of padding.

    Args:
      batch_size: number of rows.
      q_length: number of queries.
      kv_length: number of keys, those of a cache among them.
      q_offset: position of the first query in its row.
      kv_offset: position of the first key, after those that left a sliding window.
      attention_mask: bools `[B, S]` of all positions of a row, false at padding.
      device: device of the mask.
      **options: options of `sdpa_mask` of transformers, such as the window.
    """
    torch = require_torch()
    options |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    visible_B1TS = transformers().masking_utils.sdpa_mask(
        batch_size,
        q_length,
        kv_length,
        q_offset,
        kv_offset,
        attention_mask=attention_mask,
        device=device,
        **options,
    )
    if attention_mask is None:
        return visible_B1TS
    # What a mask is short of is padding, as it is for keys.
    short = max(0, kv_offset + kv_length - attention_mask.shape[-1])
    valid_BS = torch.nn.functional.pad(attention_mask, (0, short))
    valid_BT = valid_BS[:, torch.arange(q_length, device=device) + q_offset]
    return visible_B1TS & valid_BT[:, None, :, None]


def _visible(attention_mask: Any, rows: int) -> Any:
    """The mask of one call `[B, 1, T, S]`, if it is one of bools for all heads."""
    if attention_mask is None:
        raise UsageError(
            "attention_mask: an attention layer was called without one, which its model makes; run "
            "the whole model"
        )
    kind, shape = str(attention_mask.dtype), tuple(attention_mask.shape)
    if kind != "torch.bool" or len(shape) != 4 or shape[1] != 1:
        raise UsageError(
            f"attention_mask of {kind} and shape {shape} is not supported; give rows of tokens "
            "[B, S] with 0 at padding, or bools [B, 1, T, S] that are true where a query sees a key"
        )
    return attention_mask.expand(rows, -1, -1, -1)


def _layer(module: Any, options: Mapping[str, Any]) -> Layer:
    """The gates of an attention module, if its edges are to be closed here."""
    layer = getattr(module, NAME, None)
    if layer is None:
        raise UsageError(
            f"attn_implementation = {NAME!r}: this model has no gates yet; call "
            "torch_gates.load_gates(model), or give a dense model another attention function"
        )
    if given := [name for name in _REFUSED if options.get(name) is not None]:
        raise UsageError(f"{', '.join(given)}: not supported by gates; run the model without it")
    if layer.gates.in_bridge:
        raise UsageError(
            "bridge: for this model it calls the attention of transformers, and gates would close "
            "twice; load and boot it again, and in place of add_to_bridge call "
            f"model.set_attn_implementation({NAME!r})"
        )
    return layer
