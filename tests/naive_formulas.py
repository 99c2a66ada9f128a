"""The family's formulas once more, in numpy loops over elements and heads, written from the documents.

Slow and plain on purpose: nothing is shared with tfm_model but the weights, which come as the documents have
them, one matrix for each head, (out, in).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

Array = np.ndarray


def sigmoid(x: Array) -> Array:
    return np.vectorize(lambda v: 1 / (1 + math.exp(-v)) if v >= 0 else math.exp(v) / (1 + math.exp(v)))(x)


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "relu": lambda x: np.where(x > 0, x, 0.0),
    "gelu": np.vectorize(lambda v: v * 0.5 * (1 + math.erf(v / math.sqrt(2)))),
    "gelu_tanh": np.vectorize(
        lambda v: 0.5 * v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3)))
    ),
    "silu": lambda x: x * sigmoid(x),
    "sigmoid": sigmoid,
    "tanh": np.tanh,
}


def layer_norm(x: Array, weight: Array, bias: Array, eps: float) -> Array:
    """Of one vector, with the population's variance."""
    mean = sum(x) / len(x)
    variance = sum((v - mean) ** 2 for v in x) / len(x)
    return (x - mean) / math.sqrt(variance + eps) * weight + bias


@dataclass
class Head:
    """One head's matrices: queries, keys (k, d), values (v, d), and W_c, which brings it back (d, v)."""

    query: Array
    key: Array
    value: Array
    back: Array


@dataclass
class Distances:
    """What a distance adds: `key` and `value` vectors (Shaw), or `bias` of a head and a distance."""

    key: Callable[[int], Array] | None = None
    value: Callable[[int], Array] | None = None
    bias: Callable[[int, int], float] | None = None


def attention_weights(scores: Sequence[float]) -> list[float]:
    top = max(scores)
    powers = [math.exp(score - top) for score in scores]
    return [power / sum(powers) for power in powers]


def attention(
    x: Array, heads: Sequence[Head], scale: float, *, causal: bool, distances: Distances | None = None
) -> Array:
    """Σ_h W_ch^T Σ_j α_ij^h V^h(x_j), for each i."""
    distances, rows = distances or Distances(), []
    for i in range(len(x)):
        total = np.zeros(x.shape[1])
        for h, head in enumerate(heads):
            seen = range(i + 1) if causal else range(len(x))
            query, scores = head.query @ x[i], []
            for j in seen:
                key = head.key @ x[j]
                if distances.key is not None:
                    key = key + distances.key(j - i)
                score = float(query @ key) * scale
                scores.append(score + (distances.bias(h, j - i) if distances.bias is not None else 0.0))
            for weight, j in zip(attention_weights(scores), seen, strict=True):
                value = head.value @ x[j]
                if distances.value is not None:
                    value = value + distances.value(j - i)
                total = total + weight * (head.back @ value)
        rows.append(total)
    return np.array(rows)


def mlp(x: Array, layers: Sequence[tuple[Array, Array]], activation: str) -> Array:
    """Of one vector: W_2^T σ(W_1^T x), each with its bias; σ after all but the last."""
    for weight, bias in layers[:-1]:
        x = ACTIVATIONS[activation](weight @ x + bias)
    weight, bias = layers[-1]
    return weight @ x + bias


Norm = Callable[[Array], Array]


def post_norm_block(x: Array, mix: Callable[[Array], Array], think: Norm, norms: tuple[Norm, Norm]) -> Array:
    """u = LayerNorm(x + u'), z = LayerNorm(u + z')."""
    mixed = mix(x)
    u = np.array([norms[0](x[i] + mixed[i]) for i in range(len(x))])
    return np.array([norms[1](row + think(row)) for row in u])


def pre_norm_block(x: Array, mix: Callable[[Array], Array], think: Norm, norms: tuple[Norm, Norm]) -> Array:
    """Y = X + MHSA(LayerNorm(X)), X' = Y + MLP(LayerNorm(Y))."""
    y = x + mix(np.array([norms[0](row) for row in x]))
    return np.array([row + think(norms[1](row)) for row in y])


def sinusoids(places: int, width: int, base: float) -> Array:
    """p[k, 2i] = sin(k / b^(2i/d)), p[k, 2i+1] = cos(k / b^(2i/d))."""
    table = np.zeros((places, width))
    for k in range(places):
        for i in range(width // 2):
            table[k, 2 * i] = math.sin(k / base ** (2 * i / width))
            table[k, 2 * i + 1] = math.cos(k / base ** (2 * i / width))
    return table


def features(x: Array, directions: Array) -> Array:
    """φ(x) = sqrt(1/D) [sin(w_1·x) ... sin(w_D·x), cos(w_1·x) ... cos(w_D·x)]."""
    angles = [float(w @ x) for w in directions]
    waves = [math.sin(a) for a in angles] + [math.cos(a) for a in angles]
    return math.sqrt(1 / len(directions)) * np.array(waves)


def random_feature_attention(
    queries: Array, keys: Array, values: Array, directions: Array, scale: float, sigma: float, *, causal: bool
) -> Array:
    """One head: φ(q)·Σ e_k φ(k) v^T / φ(q)·Σ e_k φ(k), with e_k = exp(s|k|²/2) and both shrunk by sqrt(s)/σ."""
    shrink, rows = math.sqrt(scale) / sigma, []
    for i, query in enumerate(queries):
        top, bottom = np.zeros(values.shape[1]), 0.0
        for j in range(i + 1 if causal else len(keys)):
            kernel = features(query * shrink, directions) @ features(keys[j] * shrink, directions)
            kernel = kernel * math.exp(scale * float(keys[j] @ keys[j]) / 2)
            top, bottom = top + kernel * values[j], bottom + kernel
        rows.append(top / bottom)
    return np.array(rows)


def softmax_attention(queries: Array, keys: Array, values: Array, scale: float, *, causal: bool) -> Array:
    rows = []
    for i, query in enumerate(queries):
        seen = slice(0, i + 1) if causal else slice(None)
        weights = attention_weights([float(query @ key) * scale for key in keys[seen]])
        rows.append(np.array(weights) @ values[seen])
    return np.array(rows)


@dataclass
class LstmWeights:
    """Of each gate by its letter (i, o, f, c): the input's matrix, the state's matrix, the bias."""

    x: dict[str, Array]
    h: dict[str, Array]
    bias: dict[str, Array]


def lstm(x: Array, w: LstmWeights, candidate: str, output: str) -> tuple[Array, Array, Array]:
    """c̃ = σ_c(W_ch h + W_cx x), i, f, o = σ(...), c = i∘c̃ + f∘c_prev, h = o∘σ_h(c): every h, the last h and c."""
    width = len(w.bias["i"])
    h, c, rows = np.zeros(width), np.zeros(width), []
    for element in x:
        parts = {gate: w.h[gate] @ h + w.x[gate] @ element + w.bias[gate] for gate in "iofc"}
        new = ACTIVATIONS[candidate](parts["c"])
        c = sigmoid(parts["i"]) * new + sigmoid(parts["f"]) * c
        h = sigmoid(parts["o"]) * ACTIVATIONS[output](c)
        rows.append(h)
    return np.array(rows), h, c


def ablated_weights(i: Array, f: Array) -> Array:
    """w[t, s] = i_s ∏_{k=s+1..t} f_k, of each dimension: (T, T, N), 0 for s > t."""
    T, N = i.shape
    w = np.zeros((T, T, N))
    for s in range(T):
        product = i[s].copy()
        for t in range(s, T):
            if t > s:
                product = product * f[t]
            w[t, s] = product
    return w


def ablated_cells(i: Array, f: Array, content: Array) -> Array:
    """c = i∘c̃ + f∘c_prev, step by step."""
    c, rows = np.zeros(i.shape[1]), []
    for t in range(len(i)):
        c = i[t] * content[t] + f[t] * c
        rows.append(c)
    return np.array(rows)
