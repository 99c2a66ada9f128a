"""Small bundles of every kind that is no language model, each with the same computation in plain numpy.

An encoder over tokens, vectors or images; a recurrent regressor over vectors; a decoder that shows its
attention; an encoder-decoder whose cross keys and values are computed once. All are one attention layer
(H heads of D) around `WIDTH` numbers, in standard operators.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import list_files, tiny_tokenizer, token_input, write_manifest

from tfmx.runtime.bundle import (
    FORMAT,
    GenerationInfo,
    GraphInfo,
    InputInfo,
    Manifest,
    OutputInfo,
    SourceInfo,
    StateInfo,
    TensorInfo,
)

VOCAB, TARGETS, FEATURES, LENGTH, CONTEXT = 260, 40, 3, 24, 20
H, D, WIDTH = 2, 4, 8
FUSED = 16  # head size of the one head of GroupQueryAttention
IMAGE, PATCH = (3, 8, 12), 4  # six patches
MEAN, STD = (0.5, 0.4, 0.3), (0.2, 0.25, 0.5)
START, END = 1, 4  # the random model says 4 now and then
LABELS = ("cat", "dog", "owl", "yak")

Weights = dict[str, np.ndarray]
Dims = tuple[int | str, ...]


def kind_weights(seed: int = 0) -> Weights:
    rng = np.random.default_rng(seed)
    shapes = {
        "embed": (VOCAB, WIDTH), "target": (TARGETS, WIDTH), "position": (64, WIDTH), "first": (1, 1, WIDTH),
        "project": (FEATURES, WIDTH), "patch": (3 * PATCH * PATCH, WIDTH), "recur": (FEATURES, WIDTH),
        "classes": (WIDTH, len(LABELS)), "values": (WIDTH, 2), "tokens": (WIDTH, TARGETS),
    }  # fmt: skip
    shapes |= {f"{layer}.{part}": (WIDTH, WIDTH) for layer in ("self", "own", "cross") for part in "qkvo"}
    shapes |= {"fused": (FEATURES, 3 * FUSED), "wide": (FUSED, 2)}
    tables = {"embed", "target", "position", "first"}
    return {
        name: (rng.standard_normal(shape) / (1 if name in tables else np.sqrt(shape[0]))).astype(np.float32)
        for name, shape in shapes.items()
    }


# --- the reference, in float64 ---------------------------------------------------------------------------


def attend(w: Weights, layer: str, x: np.ndarray, y: np.ndarray, *, causal: bool = False):
    """x (T, WIDTH) looks at y (S, WIDTH); gives x with what it saw, and the weights (H, T, S)."""
    q, k, v = (a @ w[f"{layer}.{part}"].astype(float) for a, part in ((x, "q"), (y, "k"), (y, "v")))
    q, k, v = (a.reshape(len(a), H, D).transpose(1, 0, 2) for a in (q, k, v))  # (H, T, D)
    scores = q @ k.transpose(0, 2, 1) / np.sqrt(D)
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    scores = np.exp(scores - scores.max(-1, keepdims=True))
    scores /= scores.sum(-1, keepdims=True)
    return x + (scores @ v).transpose(1, 0, 2).reshape(len(x), WIDTH) @ w[f"{layer}.o"], scores


def embedded(w: Weights, ids, table: str = "embed") -> np.ndarray:
    return w[table][ids].astype(float) + w["position"][: len(ids)]


def token_classes(w: Weights, ids):
    x = embedded(w, ids)
    x, maps = attend(w, "self", x, x)
    return x.mean(0) @ w["classes"], maps


def vector_values(w: Weights, vectors):
    x = np.asarray(vectors, float) @ w["project"]
    return attend(w, "self", x, x)[0] @ w["values"]


def image_classes(w: Weights, pixels: np.ndarray):
    C, height, width = pixels.shape
    patches = pixels.reshape(C, height // PATCH, PATCH, width // PATCH, PATCH).transpose(1, 3, 0, 2, 4)
    x = np.concatenate((w["first"][0], patches.reshape(-1, C * PATCH * PATCH).astype(float) @ w["patch"]))
    x, maps = attend(w, "self", x, x)
    return x[0] @ w["classes"], maps


def running_values(w: Weights, vectors):
    return np.tanh(np.cumsum(np.asarray(vectors, float) @ w["recur"], axis=0)) @ w["values"]


def fused_values(w: Weights, vectors):
    q, k, v = np.split(np.asarray(vectors, float) @ w["fused"], 3, axis=1)
    scores = np.exp(np.where(np.tril(np.ones((len(q), len(q)), bool)), q @ k.T / np.sqrt(FUSED), -np.inf))
    return scores / scores.sum(-1, keepdims=True) @ v @ w["wide"]


def decoder_logits(w: Weights, ids):
    x = embedded(w, ids, "target")
    x, maps = attend(w, "own", x, x, causal=True)
    return x @ w["tokens"], maps


def pair_outputs(w: Weights, source, target) -> dict[str, np.ndarray]:
    y = embedded(w, source)
    y, encoder_maps = attend(w, "self", y, y)
    x = embedded(w, [START, *target], "target")
    x, maps = attend(w, "own", x, x, causal=True)
    x, cross_maps = attend(w, "cross", x, y)
    return {
        "logits": x @ w["tokens"],
        "attentions.0": maps,
        "cross_attentions.0": cross_maps,
        "last_hidden_state": y,
        "encoder_attentions.0": encoder_maps,
    }


def pair_greedy(w: Weights, source, steps: int) -> list[int]:
    ids: list[int] = []
    while len(ids) < steps and (not ids or ids[-1] != END):
        ids.append(int(pair_outputs(w, source, ids)["logits"][-1].argmax()))
    return ids


# --- the graphs ------------------------------------------------------------------------------------------


@dataclass
class Net:
    """Collects nodes; every method returns the name of its result."""

    weights: Weights
    dtype: type[np.generic] = np.float32
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: Weights = field(default_factory=dict)
    inputs: list[TensorInfo] = field(default_factory=list)
    outputs: list[TensorInfo] = field(default_factory=list)

    def op(self, kind: str, *inputs: str, **attributes: Any) -> str:
        name = f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, list(inputs), [name], **attributes))
        return name

    def const(self, value: object, dtype: type[np.generic] = np.int64) -> str:
        name = f"const_{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype)
        return name

    def weight(self, name: str) -> str:
        return self.const(self.weights[name], self.dtype)

    def input(self, name: str, dtype: str, *shape: int | str) -> str:
        self.inputs.append(TensorInfo(name=name, dtype=dtype, shape=("batch_size", *shape)))
        return name

    def output(self, value: str, name: str, *shape: int | str, dtype: str = "float32") -> None:
        kind = TensorProto.FLOAT if dtype == "float32" else TensorProto.FLOAT16
        self.nodes.append(helper.make_node("Cast", [value], [name], to=kind))
        self.outputs.append(TensorInfo(name=name, dtype=dtype, shape=("batch_size", *shape)))

    def heads(self, x: str) -> str:  # (B, T, WIDTH) -> (B, H, T, D)
        return self.op("Transpose", self.op("Reshape", x, self.const([0, 0, H, D])), perm=[0, 2, 1, 3])

    def projected(self, x: str, name: str) -> str:
        return self.heads(self.op("MatMul", x, self.weight(name)))

    def attend(self, layer: str, x: str, k: str, v: str, allowed: str | None) -> tuple[str, str]:
        """x with what it saw, and the weights (B, H, T, S); `allowed` broadcasts to those."""
        scores = self.op(
            "MatMul", self.projected(x, f"{layer}.q"), self.op("Transpose", k, perm=[0, 1, 3, 2])
        )
        scores = self.op("Mul", scores, self.const(1 / np.sqrt(D), self.dtype))
        if allowed is not None:
            scores = self.op("Where", allowed, scores, self.const(-6e4, self.dtype))
        weights = self.op("Softmax", scores, axis=-1)
        seen = self.op("Transpose", self.op("MatMul", weights, v), perm=[0, 2, 1, 3])
        seen = self.op("Reshape", seen, self.const([0, 0, WIDTH]))
        return self.op("Add", x, self.op("MatMul", seen, self.weight(f"{layer}.o"))), weights

    def real(self, mask: str) -> str:  # (B, S) -> (B, 1, 1, S)
        return self.op("Unsqueeze", self.op("Cast", mask, to=TensorProto.BOOL), self.const([1, 2]))

    def causal(self) -> str:
        """(B, 1, T, P+T): which of the past and the new tokens each new one may look at."""
        total = self.op("Shape", "attention_mask", start=1, end=2)
        new = self.op("Shape", "input_ids", start=1, end=2)
        columns = self.op("Range", self.const(0), self.op("Squeeze", total), self.const(1))
        rows = self.op("Slice", columns, self.op("Sub", total, new), total)
        seen = self.op("LessOrEqual", columns, self.op("Unsqueeze", rows, self.const([1])))
        return self.op("And", seen, self.real("attention_mask"))

    def model(self, role: str) -> bytes:
        types = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}

        def values(tensors: list[TensorInfo]) -> list[onnx.ValueInfoProto]:
            return [helper.make_tensor_value_info(t.name, types[t.dtype], list(t.shape)) for t in tensors]

        constants = [numpy_helper.from_array(array, name) for name, array in self.constants.items()]
        graph = helper.make_graph(self.nodes, role, values(self.inputs), values(self.outputs), constants)
        opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
        model = helper.make_model(graph, opset_imports=opsets, ir_version=8)
        return model.SerializeToString(deterministic=True)


def encode_tokens(net: Net) -> str:
    ids, mask = net.input("input_ids", "int64", "T"), net.input("attention_mask", "int64", "T")
    places = net.op("Sub", net.op("CumSum", mask, net.const(1)), net.const(1))
    places = net.op("Max", places, net.const(0))
    return net.op(
        "Add", net.op("Gather", net.weight("embed"), ids), net.op("Gather", net.weight("position"), places)
    )


def encode_patches(net: Net) -> str:
    C, height, width = IMAGE
    pixels = net.input("pixel_values", "float32", C, height, width)
    x = net.op("Reshape", pixels, net.const([0, C, height // PATCH, PATCH, width // PATCH, PATCH]))
    x = net.op("Transpose", x, perm=[0, 2, 4, 1, 3, 5])
    x = net.op("Reshape", x, net.const([0, -1, C * PATCH * PATCH]))
    x = net.op("MatMul", x, net.weight("patch"))
    batch = net.op("Concat", net.op("Shape", pixels, start=0, end=1), net.const([1, WIDTH]), axis=0)
    return net.op("Concat", net.op("Expand", net.weight("first"), batch), x, axis=1)


def self_attended(net: Net, x: str, allowed: str | None) -> tuple[str, str]:
    return net.attend("self", x, net.projected(x, "self.k"), net.projected(x, "self.v"), allowed)


# --- the bundles -----------------------------------------------------------------------------------------


def write_kind(
    folder: Path,
    nets: dict[str, Net],
    *,
    kind: Literal["decoder", "encoder", "encoder-decoder"],
    inputs: InputInfo,
    outputs: OutputInfo,
    max_context: int,
    state: tuple[StateInfo, ...] = (),
    dtype: Literal["fp32", "fp16"] = "fp32",
    extra_files: dict[str, bytes] | None = None,
) -> Manifest:
    folder.mkdir(parents=True, exist_ok=True)
    files = {f"{role}.onnx": net.model(role) for role, net in nets.items()} | (extra_files or {})
    if inputs.kind == "tokens" and inputs.vocab_size == VOCAB:
        files["tokenizer.json"] = tiny_tokenizer().to_str().encode()
    for name, data in files.items():
        (folder / name).write_bytes(data)
    starts = kind == "encoder-decoder"
    manifest = Manifest(
        format=FORMAT,
        tfmx="0.1.0",
        tools={},
        source=SourceInfo(kind="python", files={}),
        kind=kind,
        target="portable",
        dtype=dtype,
        quant=None,
        opset=18,
        inputs=inputs,
        outputs=outputs,
        vocab_size=outputs.size if outputs.kind == "tokens" else None,
        max_context=max_context,
        model={},
        graphs={
            role: GraphInfo(file=f"{role}.onnx", inputs=tuple(net.inputs), outputs=tuple(net.outputs))
            for role, net in nets.items()
        },
        state=state,
        generation=GenerationInfo(
            bos_token_id=None,
            eos_token_ids=(END,) if outputs.kind == "tokens" else (),
            pad_token_id=None,
            decoder_start_token_id=START if starts else None,
            sampling={},
        ),
        parity=None,
        quality=None,
        files=list_files(folder),
    )
    write_manifest(folder, manifest)
    return manifest


def vector_input(length: int = LENGTH) -> InputInfo:
    return InputInfo(
        kind="vectors", vocab_size=None, features=FEATURES, image=None, mean=None, std=None, length=length
    )


def image_input() -> InputInfo:
    return InputInfo(kind="images", vocab_size=None, features=None, image=IMAGE, mean=MEAN, std=STD, length=7)


def write_token_classifier(folder: Path, *, weights: Weights | None = None, **files: bytes) -> Manifest:
    """An encoder: tokens in, pooled classes with labels out, and its attention."""
    net = Net(weights or kind_weights())
    x, maps = self_attended(net, encode_tokens(net), net.real("attention_mask"))
    mask = net.op("Unsqueeze", net.op("Cast", "attention_mask", to=TensorProto.FLOAT), net.const([2]))
    total = net.op("ReduceSum", net.op("Mul", x, mask), net.const([1]), keepdims=0)
    mean = net.op("Div", total, net.op("ReduceSum", mask, net.const([1]), keepdims=0))
    net.output(net.op("MatMul", mean, net.weight("classes")), "logits", len(LABELS))
    net.output(maps, "attentions.0", H, "T", "T")
    return write_kind(
        folder,
        {"encode": net},
        kind="encoder",
        inputs=token_input(VOCAB, LENGTH),
        outputs=OutputInfo(kind="classes", name="logits", size=len(LABELS), pooled=True, labels=LABELS),
        max_context=LENGTH,
        extra_files=golden_file(files),
    )


def write_vector_regressor(
    folder: Path, *, weights: Weights | None = None, dtype: Literal["fp32", "fp16"] = "fp32", **files: bytes
) -> Manifest:
    """An encoder: a set of vectors in, two values for each out."""
    net = Net(weights or kind_weights(), np.float16 if dtype == "fp16" else np.float32)
    float_type = "float16" if dtype == "fp16" else "float32"
    features = net.input("input_features", float_type, "T", FEATURES)
    net.input("attention_mask", "int64", "T")
    x = net.op("MatMul", features, net.weight("project"))
    x, _ = self_attended(net, x, net.real("attention_mask"))
    net.output(net.op("MatMul", x, net.weight("values")), "values", "T", 2)
    return write_kind(
        folder,
        {"encode": net},
        kind="encoder",
        inputs=vector_input(),
        outputs=OutputInfo(kind="values", name="values", size=2, pooled=False, labels=None),
        max_context=LENGTH,
        dtype=dtype,
        extra_files=golden_file(files),
    )


def write_image_classifier(folder: Path, *, weights: Weights | None = None, **files: bytes) -> Manifest:
    """An encoder: images in, classes by the class token out, and its attention."""
    net = Net(weights or kind_weights())
    x, maps = self_attended(net, encode_patches(net), None)
    first = net.op(
        "Squeeze", net.op("Slice", x, net.const([0]), net.const([1]), net.const([1])), net.const([1])
    )
    net.output(net.op("MatMul", first, net.weight("classes")), "logits", len(LABELS))
    net.output(maps, "attentions.0", H, 7, 7)
    return write_kind(
        folder,
        {"encode": net},
        kind="encoder",
        inputs=image_input(),
        outputs=OutputInfo(kind="classes", name="logits", size=len(LABELS), pooled=True, labels=LABELS),
        max_context=7,
        extra_files=golden_file(files),
    )


def recurrent_net(role: str, weights: Weights, *, last_only: bool) -> Net:
    net, T = Net(weights), 1 if role == "decode" else "T"
    features = net.input("input_features", "float32", T, FEATURES)
    mask = net.input("attention_mask", "int64", "total")
    past = net.input("past_state", "float32", WIDTH)
    new = net.op(
        "Slice",
        mask,
        net.op("Neg", net.op("Shape", features, start=1, end=2)),
        net.const([2**62]),
        net.const([1]),
    )
    new = net.op("Unsqueeze", net.op("Cast", new, to=TensorProto.FLOAT), net.const([2]))
    added = net.op("Mul", net.op("MatMul", features, net.weight("recur")), new)
    sums = net.op("Add", net.op("CumSum", added, net.const(1)), net.op("Unsqueeze", past, net.const([1])))
    last = net.op("Slice", sums, net.const([-1]), net.const([2**62]), net.const([1]))
    seen = last if last_only else sums
    columns = 1 if last_only else T
    net.output(net.op("MatMul", net.op("Tanh", seen), net.weight("values")), "values", columns, 2)
    net.output(net.op("Squeeze", last, net.const([1])), "present_state", WIDTH)
    return net


def write_recurrent_regressor(
    folder: Path, *, weights: Weights | None = None, last_only: bool = False, **files: bytes
) -> Manifest:
    """A decoder: vectors in, two values for each (or for the last) out, with a state of constant size."""
    w = weights or kind_weights()
    state = StateInfo(
        past="past_state",
        present="present_state",
        dtype="float32",
        shape=("batch_size", WIDTH),
        growth="constant",
    )
    return write_kind(
        folder,
        {role: recurrent_net(role, w, last_only=last_only) for role in ("prefill", "decode")},
        kind="decoder",
        inputs=vector_input(CONTEXT),
        outputs=OutputInfo(kind="values", name="values", size=2, pooled=False, labels=None),
        max_context=CONTEXT,
        state=(state,),
        extra_files=golden_file(files),
    )


def fused_net(role: str, weights: Weights, *, last_only: bool) -> Net:
    net, T = Net(weights), 1 if role == "decode" else "T"
    features = net.input("input_features", "float32", T, FEATURES)
    mask = net.input("attention_mask", "int64", "total")
    past = [net.input(f"past.{part}", "float32", 1, "past", FUSED) for part in ("key", "value")]
    real = net.op("ReduceSum", mask, net.const([1]), keepdims=0)
    counts = [net.op("Sub", real, net.const(1)), net.op("Squeeze", net.op("Shape", mask, start=1, end=2))]
    counts = [net.op("Cast", count, to=TensorProto.INT32) for count in counts]
    qkv = net.op("MatMul", features, net.weight("fused"))
    outputs = ["seen", "present.key", "present.value"]
    node = helper.make_node(
        "GroupQueryAttention",
        [qkv, "", "", *past, *counts],
        outputs,
        domain="com.microsoft",
        num_heads=1,
        kv_num_heads=1,
    )
    net.nodes.append(node)
    seen = outputs[0]
    if last_only:
        seen = net.op("Slice", seen, net.const([-1]), net.const([2**62]), net.const([1]))
    elif role == "prefill":
        net.inputs.append(TensorInfo(name="num_logits_to_keep", dtype="int64", shape=()))
        net.constants["num_logits_to_keep"] = np.asarray(0, np.int64)
        start = net.op("Unsqueeze", net.op("Neg", "num_logits_to_keep"), net.const([0]))
        seen = net.op("Slice", seen, start, net.const([2**62]), net.const([1]))
    columns = 1 if last_only or role == "decode" else "kept"
    net.output(net.op("MatMul", seen, net.weight("wide")), "values", columns, 2)
    shape: Dims = ("batch_size", 1, "past", FUSED)
    net.outputs += [TensorInfo(name=name, dtype="float32", shape=shape) for name in outputs[1:]]
    return net


def write_fused_regressor(folder: Path, *, last_only: bool = False) -> Manifest:
    """A decoder over vectors whose cache has a fixed capacity."""
    state = tuple(
        StateInfo(
            past=f"past.{part}",
            present=f"present.{part}",
            dtype="float32",
            shape=("batch_size", 1, "past", FUSED),
            growth="capacity",
        )
        for part in ("key", "value")
    )
    return write_kind(
        folder,
        {role: fused_net(role, kind_weights(), last_only=last_only) for role in ("prefill", "decode")},
        kind="decoder",
        inputs=vector_input(CONTEXT),
        outputs=OutputInfo(kind="values", name="values", size=2, pooled=False, labels=None),
        max_context=CONTEXT,
        state=state,
    )


def decoder_net(role: str, weights: Weights, *, cross: bool) -> Net:
    net, T = Net(weights), 1 if role == "decode" else "T"
    ids, places = net.input("input_ids", "int64", T), net.input("position_ids", "int64", T)
    net.input("attention_mask", "int64", "total")
    x = net.op("Gather", net.weight("target"), ids)
    x = net.op("Add", x, net.op("Gather", net.weight("position"), places))
    parts = {}
    for part in ("key", "value"):
        past = net.input(f"past.{part}", "float32", H, "past", D)
        parts[part] = net.op("Concat", past, net.projected(x, f"own.{part[0]}"), axis=2)
    x, maps = net.attend("own", x, parts["key"], parts["value"], net.causal())
    if cross:
        net.input("encoder_attention_mask", "int64", "S")
        keys, values = (net.input(f"cross.{part}", "float32", H, "S", D) for part in ("key", "value"))
        x, cross_maps = net.attend("cross", x, keys, values, net.real("encoder_attention_mask"))
        net.output(cross_maps, "cross_attentions.0", H, T, "S")
    net.output(net.op("MatMul", x, net.weight("tokens")), "logits", T, TARGETS)
    net.output(maps, "attentions.0", H, T, "total")
    for part, value in parts.items():
        net.output(value, f"present.{part}", H, "total", D)
    return net


def cache_state() -> tuple[StateInfo, ...]:
    shape: Dims = ("batch_size", H, "past", D)
    return tuple(
        StateInfo(
            past=f"past.{part}", present=f"present.{part}", dtype="float32", shape=shape, growth="append"
        )
        for part in ("key", "value")
    )


def write_showing_decoder(folder: Path, *, weights: Weights | None = None) -> Manifest:
    """A language model that gives its attention."""
    w = weights or kind_weights()
    return write_kind(
        folder,
        {role: decoder_net(role, w, cross=False) for role in ("prefill", "decode")},
        kind="decoder",
        inputs=token_input(TARGETS, CONTEXT),
        outputs=OutputInfo(kind="tokens", name="logits", size=TARGETS, pooled=False, labels=None),
        max_context=CONTEXT,
        state=cache_state(),
    )


def write_encoder_decoder(folder: Path, *, weights: Weights | None = None, **files: bytes) -> Manifest:
    """Tokens in, other tokens out; cross keys and values are computed once, and all attention is shown."""
    w = weights or kind_weights()
    net = Net(w)
    x, maps = self_attended(net, encode_tokens(net), net.real("attention_mask"))
    net.output(x, "last_hidden_state", "T", WIDTH)
    for part in ("key", "value"):
        net.output(net.projected(x, f"cross.{part[0]}"), f"cross.{part}", H, "T", D)
    net.output(maps, "encoder_attentions.0", H, "T", "T")
    fixed = tuple(
        StateInfo(
            past=f"cross.{part}",
            present=f"cross.{part}",
            dtype="float32",
            shape=("batch_size", H, "S", D),
            growth="fixed",
        )
        for part in ("key", "value")
    )
    return write_kind(
        folder,
        {"encode": net, **{role: decoder_net(role, w, cross=True) for role in ("prefill", "decode")}},
        kind="encoder-decoder",
        inputs=token_input(VOCAB, LENGTH),
        outputs=OutputInfo(kind="tokens", name="logits", size=TARGETS, pooled=False, labels=None),
        max_context=CONTEXT,
        state=(*cache_state(), *fixed),
        extra_files=golden_file(files),
    )


def golden_file(files: dict[str, bytes]) -> dict[str, bytes]:
    """`golden=b"..."` as golden.npz."""
    return {f"{name}.npz": data for name, data in files.items()}
