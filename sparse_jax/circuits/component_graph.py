"""The component graph of a decoder: writers to the residual stream, readers of it, edges between.

Writers are the input (embedding), every head and every MLP. Readers are the query, key and value
inputs of heads, every MLP, and the logits. An edge joins a writer with a later reader. In a
parallel block the MLP reads no head of its own layer.

Query heads that share a key head (grouped-query attention) share one key reader and one value
reader. MIB and EAP-IG count them once for each query head; so does `num_edges`, and
`ComponentGraph.ungrouped` is their graph.

    writers     0 input     1 + l (N + 1) + n  head n of layer l     1 + l (N + 1) + N  its MLP
    readers     l (N + 2 K + 1) + (n | N + k | N + K + k | N + 2 K)  query, key, value, MLP;
                last the logits
"""

import dataclasses

import numpy as np

from lm_jax.errors import UsageError
from lm_jax.model.config import DecoderConfig


@dataclasses.dataclass(frozen=True)
class ComponentGraph:
    """Writers, readers and edges of a decoder of L layers, N query heads and K key heads.

    Arrays have the letters U (writers) and R (readers).
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_size: int
    parallel: bool = False

    @classmethod
    def of(cls, cfg: DecoderConfig) -> "ComponentGraph":
        """The graph of a model.

        Raises:
          UsageError: the model has no MLPs, or layers that differ in shape.
        """
        if not cfg.mlp_size:
            raise UsageError("mlp_size = 0: the component graph has an MLP in every layer")
        cfg.check_equal_blocks("model: the component graph")
        return cls(
            cfg.num_layers, cfg.num_heads, cfg.num_kv_heads, cfg.hidden_size, cfg.parallel_residual
        )

    def ungrouped(self) -> "ComponentGraph":
        """The same with a key and a value reader for each query head."""
        return dataclasses.replace(self, num_kv_heads=self.num_heads)

    @property
    def num_writers(self) -> int:
        """The number of writers, U."""
        return 1 + self.num_layers * (self.num_heads + 1)

    @property
    def layer_readers(self) -> int:
        """Readers in one layer."""
        return self.num_heads + 2 * self.num_kv_heads + 1

    @property
    def num_readers(self) -> int:
        """The number of readers, R."""
        return self.num_layers * self.layer_readers + 1

    @property
    def num_edges(self) -> int:
        """Edges of this graph."""
        return int(self.mask_UR.sum())

    @property
    def mask_UR(self) -> np.ndarray:
        """True where there is an edge."""
        return np.arange(self.num_writers)[:, None] < self._before_R

    @property
    def multiplicity_R(self) -> np.ndarray:
        """Query heads that share each reader: N / K for keys and values, else 1."""
        N, K = self.num_heads, self.num_kv_heads
        layer = np.repeat([1, N // K, 1], [N, 2 * K, 1])
        return np.append(np.tile(layer, self.num_layers), 1)

    @property
    def writer_names(self) -> tuple[str, ...]:
        """`input`, `a{layer}.h{head}`, `m{layer}`: the names of EAP-IG."""
        names = ["input"]
        for layer in range(self.num_layers):
            names += [f"a{layer}.h{head}" for head in range(self.num_heads)] + [f"m{layer}"]
        return tuple(names)

    @property
    def reader_names(self) -> tuple[str, ...]:
        """`a{layer}.h{head}<q>`, `m{layer}`, `logits`; of shared keys `a{layer}.h0-2<k>`."""
        shared = self.num_heads // self.num_kv_heads
        names = []
        for layer in range(self.num_layers):
            names += [f"a{layer}.h{head}<q>" for head in range(self.num_heads)]
            for letter in ("k", "v"):
                for first in range(0, self.num_heads, shared):
                    heads = f"{first}" if shared == 1 else f"{first}-{first + shared - 1}"
                    names.append(f"a{layer}.h{heads}<{letter}>")
            names.append(f"m{layer}")
        return (*names, "logits")

    def open_writers(self, heads_LBN: np.ndarray) -> np.ndarray:
        """Which writers write anything, `[U, B]`: the given heads, every MLP and the input."""
        L, B, _ = heads_LBN.shape
        heads_LNB = heads_LBN.swapaxes(1, 2)
        layers = np.concatenate([heads_LNB, np.ones((L, 1, B), bool)], 1)
        return np.concatenate([np.ones((1, B), bool), layers.reshape(-1, B)])

    @property
    def writer_of_R(self) -> np.ndarray:
        """The component that reads there, by its index as a writer; U for the logits."""
        N, K = self.num_heads, self.num_kv_heads
        heads, groups = np.arange(N), np.arange(K) * (N // K)
        layer = np.concatenate([heads, groups, groups, [N]])
        starts = 1 + np.arange(self.num_layers)[:, None] * (N + 1)
        return np.append((starts + layer).ravel(), self.num_writers)

    @property
    def _before_R(self) -> np.ndarray:
        """Writers before each reader."""
        starts = 1 + np.arange(self.num_layers)[:, None] * (self.num_heads + 1)
        layer = np.zeros(self.layer_readers, int)
        layer[-1] = 0 if self.parallel else self.num_heads
        return np.append((starts + layer).ravel(), self.num_writers)

    def expand(self, values_XR: np.ndarray) -> np.ndarray:
        """Values of this graph's readers, such as a circuit, as values of `ungrouped`'s; last axis.

        A score of a shared reader is the sum over its query heads, and so no score of each.
        """
        return np.asarray(values_XR)[..., self._group_of_ungrouped()]

    def _group_of_ungrouped(self) -> np.ndarray:
        """The reader that each reader of `ungrouped` shares."""
        N, K = self.num_heads, self.num_kv_heads
        group_N = np.arange(N) // (N // K)
        layer = np.concatenate([np.arange(N), N + group_N, N + K + group_N, [N + 2 * K]])
        starts = np.arange(self.num_layers)[:, None] * self.layer_readers
        return np.append((starts + layer).ravel(), self.num_readers - 1)


def num_edges(cfg: DecoderConfig) -> int:
    """Edges of the component graph with key and value readers for each query head.

    This is the count of MIB and EAP-IG: 32,491 for GPT-2 small, 123,211 for SmolLM2-135M.
    """
    return ComponentGraph.of(cfg).ungrouped().num_edges
