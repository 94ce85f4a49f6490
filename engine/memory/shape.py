"""What of a decoder takes memory: its matrices, vectors and KV heads, as numbers without weights."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Matrix:
    """Weights that activations are multiplied with: so many `elements` in rows of `columns`."""

    elements: int
    columns: int

    @property
    def rows(self) -> int:
        return -(-self.elements // self.columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder by what it takes.

    `matrices`       of all layers, those of one width together
    `vectors`        elements of norms and biases
    `embedding`      elements of the table in which token ids are looked up; 0 where a textbook doesn't tell
    `head`           the matrix that makes logits; where `is_tied` it is the embedding once more
    `window`         tokens that `window_layers` of the layers look back; the others see the whole context
    `stored_bytes`   of the weights as a file has them
    """

    family: str
    matrices: tuple[Matrix, ...]
    vectors: int
    embedding: int
    head: Matrix | None
    is_tied: bool
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden: int
    mlp: int
    vocab_size: int
    context_tokens: int
    window: int = 0
    window_layers: int = 0
    stored_bytes: int | None = None

    @property
    def num_parameters(self) -> int:
        """Each weight once: a tied head is the embedding."""
        head = self.head.elements if self.head is not None and not self.is_tied else 0
        return self.embedding + head + self.vectors + sum(matrix.elements for matrix in self.matrices)


def decoder_shape(
    *,
    family: str = "llama",
    vocab_size: int,
    hidden: int,
    mlp: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    context_tokens: int,
    is_tied: bool = False,
    has_qkv_bias: bool = False,
    has_out_bias: bool = False,
    has_mlp_bias: bool = False,
    has_qk_norm: bool = False,
    norms_per_layer: int = 2,
    windows: Sequence[int] = (),
) -> ModelShape:
    """The shape of a decoder with grouped-query attention and a gated MLP, which all our families are. `windows`:
    tokens that each layer looks back, 0 for all."""
    query, kv = num_heads * head_dim, num_kv_heads * head_dim
    layer = [
        Matrix((query + 2 * kv) * hidden, hidden),
        Matrix(hidden * query, query),
        Matrix(2 * mlp * hidden, hidden),
        Matrix(hidden * mlp, mlp),
    ]
    vectors = norms_per_layer * hidden + has_qk_norm * 2 * head_dim
    vectors += has_qkv_bias * (query + 2 * kv) + has_out_bias * hidden + has_mlp_bias * (2 * mlp + hidden)
    return ModelShape(
        family=family,
        matrices=together(Matrix(num_layers * matrix.elements, matrix.columns) for matrix in layer),
        vectors=num_layers * vectors + hidden,
        embedding=vocab_size * hidden,
        head=Matrix(vocab_size * hidden, hidden),
        is_tied=is_tied,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        hidden=hidden,
        mlp=mlp,
        vocab_size=vocab_size,
        context_tokens=context_tokens,
        window=max(windows, default=0),
        window_layers=sum(map(bool, windows)),
    )


def together(matrices: Iterable[Matrix]) -> tuple[Matrix, ...]:
    """Matrices of the same width as one."""
    elements: Counter[int] = Counter()
    for matrix in matrices:
        elements[matrix.columns] += matrix.elements
    return tuple(Matrix(count, columns) for columns, count in sorted(elements.items()))
