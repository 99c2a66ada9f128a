"""A real two-layer decoder as a bundle, in both flavours, with the same computation in plain numpy.

Llama-like: RMSNorm, rotary positions, grouped-query attention, SwiGLU. "append" is written with
standard operators and a growing cache, "capacity" with GroupQueryAttention and a cache of fixed capacity.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx import TensorProto, helper, numpy_helper
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from tfmx.runtime.bundle import (
    FORMAT,
    FileInfo,
    GenerationInfo,
    GraphInfo,
    InputInfo,
    Manifest,
    OutputInfo,
    SourceInfo,
    StateInfo,
    TensorInfo,
    file_info,
)

Flavour = Literal["append", "capacity"]
VOCAB, HIDDEN, LAYERS, H, H_KV, D, FF, CONTEXT = 320, 32, 2, 4, 2, 16, 48, 96
BOS, EOS, IM_START, IM_END = 256, 257, 258, 259
EPS, THETA = 1e-5, 10000.0
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] | trim }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)

    def matrix(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)

    weights = {
        "embed": rng.standard_normal((VOCAB, HIDDEN)).astype(np.float32),
        "norm": np.ones(HIDDEN, np.float32),
    }
    for i in range(LAYERS):
        weights |= {
            f"{i}.norm1": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
            f"{i}.qkv": matrix(HIDDEN, (H + 2 * H_KV) * D),
            f"{i}.out": matrix(H * D, HIDDEN) * 2,
            f"{i}.norm2": rng.uniform(0.5, 1.5, HIDDEN).astype(np.float32),
            f"{i}.gate": matrix(HIDDEN, FF),
            f"{i}.up": matrix(HIDDEN, FF),
            f"{i}.down": matrix(FF, HIDDEN) * 2,
        }
    angles = np.outer(np.arange(CONTEXT), THETA ** (-np.arange(0, D, 2) / D))  # (C, D/2)
    weights["cos"], weights["sin"] = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    weights["head"] = matrix(HIDDEN, VOCAB) * 4  # not tied: a tied random model only repeats its last token
    return weights


# --- the reference ---------------------------------------------------------------------------------------


def reference_logits(weights: dict[str, np.ndarray], token_ids: list[int]) -> np.ndarray:
    """(T, V) in float64, without a cache."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    T = len(token_ids)
    x = w["embed"][token_ids]  # (T, hidden)
    causal = np.where(np.tril(np.ones((T, T), bool)), 0.0, -np.inf)

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * scale

    def rotate(x: np.ndarray) -> np.ndarray:  # (T, heads, D)
        cos, sin = w["cos"][:T, None], w["sin"][:T, None]
        a, b = x[..., : D // 2], x[..., D // 2 :]
        return np.concatenate((a * cos - b * sin, b * cos + a * sin), -1)

    for i in range(LAYERS):
        qkv = (norm(x, w[f"{i}.norm1"]) @ w[f"{i}.qkv"]).reshape(T, H + 2 * H_KV, D)
        q, k, v = rotate(qkv[:, :H]), rotate(qkv[:, H : H + H_KV]), qkv[:, H + H_KV :]
        k, v = np.repeat(k, H // H_KV, 1), np.repeat(v, H // H_KV, 1)
        scores = np.einsum("thd,shd->hts", q, k) / np.sqrt(D) + causal
        scores = np.exp(scores - scores.max(-1, keepdims=True))
        scores /= scores.sum(-1, keepdims=True)
        x += np.einsum("hts,shd->thd", scores, v).reshape(T, H * D) @ w[f"{i}.out"]
        y = norm(x, w[f"{i}.norm2"])
        gate = y @ w[f"{i}.gate"]
        x += (gate / (1 + np.exp(-gate)) * (y @ w[f"{i}.up"])) @ w[f"{i}.down"]
    return norm(x, w["norm"]) @ w["head"]


def reference_greedy(weights: dict[str, np.ndarray], token_ids: list[int], steps: int) -> list[int]:
    ids = list(token_ids)
    for _ in range(steps):
        ids.append(int(reference_logits(weights, ids)[-1].argmax()))
    return ids[len(token_ids) :]


# --- the graphs ------------------------------------------------------------------------------------------


@dataclass
class GraphBuilder:
    """Collects nodes; every method returns the name of its result."""

    flavour: Flavour
    role: Literal["prefill", "decode"]
    dtype: type[np.generic]
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, np.ndarray] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, outputs: int = 1, domain: str = "", **attributes: object):
        names = [f"{kind}_{len(self.nodes)}_{i}" for i in range(outputs)]
        self.nodes.append(helper.make_node(kind, list(inputs), names, domain=domain, **attributes))
        return names[0] if outputs == 1 else names

    def const(self, value: object, dtype: type[np.generic] = np.int64) -> str:
        array = np.asarray(value, dtype)
        name = f"const_{hashlib.sha256(repr((array.tolist(), str(dtype))).encode()).hexdigest()[:12]}"
        self.constants[name] = array
        return name

    def norm(self, x: str, scale: str) -> str:
        return self.op("SimplifiedLayerNormalization", x, scale, axis=-1, epsilon=EPS)

    def heads(self, x: str, heads: int) -> str:  # (B, T, heads*D) -> (B, heads, T, D)
        return self.op("Transpose", self.op("Reshape", x, self.const([0, 0, heads, D])), perm=[0, 2, 1, 3])

    def rotate(self, x: str, cos: str, sin: str) -> str:
        a, b = self.op("Split", x, outputs=2, axis=-1, num_outputs=2)
        left = self.op("Sub", self.op("Mul", a, cos), self.op("Mul", b, sin))
        right = self.op("Add", self.op("Mul", b, cos), self.op("Mul", a, sin))
        return self.op("Concat", left, right, axis=-1)

    def mask(self) -> str:
        """(B, 1, T, P+T): 0 where a token may look, a large negative number elsewhere (finite: no NaN rows)."""
        total = self.op("Shape", "attention_mask", start=1, end=2)
        new = self.op("Shape", "input_ids", start=1, end=2)
        columns = self.op("Range", self.const(0), self.op("Squeeze", total), self.const(1))
        rows = self.op("Slice", columns, self.op("Sub", total, new), total)
        seen = self.op("LessOrEqual", columns, self.op("Unsqueeze", rows, self.const([1])))  # (T, P+T)
        real = self.op("Cast", "attention_mask", to=TensorProto.BOOL)
        real = self.op("Unsqueeze", real, self.const([1, 2]))  # (B, 1, 1, P+T)
        return self.op(
            "Where", self.op("And", seen, real), self.const(0, self.dtype), self.const(-6e4, self.dtype)
        )

    def attention_append(self, qkv: str, i: int, shared: dict[str, str]) -> str:
        sizes = self.const([H * D, H_KV * D, H_KV * D])
        q, k, v = self.op("Split", qkv, sizes, outputs=3, axis=-1)
        q = self.rotate(self.heads(q, H), shared["cos"], shared["sin"])
        k = self.rotate(self.heads(k, H_KV), shared["cos"], shared["sin"])
        k = self.op("Concat", f"past_key_values.{i}.key", k, axis=2)
        v = self.op("Concat", f"past_key_values.{i}.value", self.heads(v, H_KV), axis=2)
        self.nodes.append(helper.make_node("Identity", [k], [f"present.{i}.key"]))
        self.nodes.append(helper.make_node("Identity", [v], [f"present.{i}.value"]))
        spread = [np.repeat(np.arange(H_KV), H // H_KV)]
        k, v = (self.op("Gather", x, self.const(spread[0]), axis=1) for x in (k, v))
        scores = self.op("MatMul", q, self.op("Transpose", k, perm=[0, 1, 3, 2]))
        scores = self.op("Mul", scores, self.const(1 / np.sqrt(D), self.dtype))
        scores = self.op("Softmax", self.op("Add", scores, shared["mask"]), axis=-1)
        y = self.op("Transpose", self.op("MatMul", scores, v), perm=[0, 2, 1, 3])
        return self.op("Reshape", y, self.const([0, 0, H * D]))

    def attention_capacity(self, qkv: str, i: int, shared: dict[str, str]) -> str:
        outputs = [f"attention_{i}", f"present.{i}.key", f"present.{i}.value"]
        inputs = [qkv, "", "", f"past_key_values.{i}.key", f"past_key_values.{i}.value"]
        inputs += [shared["seqlens_k"], shared["total"], "cos", "sin"]
        attributes = {"num_heads": H, "kv_num_heads": H_KV, "do_rotary": 1}
        self.nodes.append(
            helper.make_node("GroupQueryAttention", inputs, outputs, domain="com.microsoft", **attributes)
        )
        return outputs[0]

    def shared(self) -> dict[str, str]:
        if self.flavour == "append":
            cos, sin = (self.op("Gather", name, "position_ids") for name in ("cos", "sin"))
            cos, sin = (self.op("Unsqueeze", x, self.const([1])) for x in (cos, sin))  # (B, 1, T, D/2)
            return {"cos": cos, "sin": sin, "mask": self.mask()}
        ones = self.op("ReduceSum", "attention_mask", self.const([1]), keepdims=0)
        seqlens_k = self.op("Cast", self.op("Sub", ones, self.const(1)), to=TensorProto.INT32)
        total = self.op("Squeeze", self.op("Shape", "attention_mask", start=1, end=2))
        return {"seqlens_k": seqlens_k, "total": self.op("Cast", total, to=TensorProto.INT32)}

    def build(self) -> None:
        shared = self.shared()
        attention = self.attention_append if self.flavour == "append" else self.attention_capacity
        x = self.op("Gather", "embed", "input_ids")
        for i in range(LAYERS):
            qkv = self.op("MatMul", self.norm(x, f"{i}.norm1"), f"{i}.qkv")
            x = self.op("Add", x, self.op("MatMul", attention(qkv, i, shared), f"{i}.out"))
            y = self.norm(x, f"{i}.norm2")
            gate = self.op("MatMul", y, f"{i}.gate")
            gate = self.op("Mul", gate, self.op("Sigmoid", gate))
            x = self.op(
                "Add",
                x,
                self.op("MatMul", self.op("Mul", gate, self.op("MatMul", y, f"{i}.up")), f"{i}.down"),
            )
        x = self.norm(x, "norm")
        if self.role == "prefill":  # -0 is 0: all positions
            start = self.op("Unsqueeze", self.op("Neg", "num_logits_to_keep"), self.const([0]))
            x = self.op("Slice", x, start, self.const([2**62]), self.const([1]))
        logits = self.op("MatMul", x, "head")
        self.nodes.append(helper.make_node("Cast", [logits], ["logits"], to=TensorProto.FLOAT))


_ONNX_TYPES = {"float32": TensorProto.FLOAT, "float16": TensorProto.FLOAT16, "int64": TensorProto.INT64}


def _signature(flavour: Flavour, role: str, dtype: str) -> tuple[list[TensorInfo], list[TensorInfo]]:
    T: int | str = 1 if role == "decode" else "sequence_length"
    past: tuple[int | str, ...] = ("batch_size", H_KV, "past_sequence_length", D)
    present = past if flavour == "capacity" else ("batch_size", H_KV, "total_sequence_length", D)
    inputs = [
        TensorInfo(name="input_ids", dtype="int64", shape=("batch_size", T)),
        TensorInfo(name="attention_mask", dtype="int64", shape=("batch_size", "total_sequence_length")),
    ]
    if flavour == "append":
        inputs.append(TensorInfo(name="position_ids", dtype="int64", shape=("batch_size", T)))
    outputs = [
        TensorInfo(name="logits", dtype="float32", shape=("batch_size", "kept" if T != 1 else 1, VOCAB))
    ]
    for i in range(LAYERS):
        for part in ("key", "value"):
            inputs.append(TensorInfo(name=f"past_key_values.{i}.{part}", dtype=dtype, shape=past))
            outputs.append(TensorInfo(name=f"present.{i}.{part}", dtype=dtype, shape=present))
    if role == "prefill":
        inputs.append(TensorInfo(name="num_logits_to_keep", dtype="int64", shape=()))
    return inputs, outputs


def _value_info(info: TensorInfo) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(info.name, _ONNX_TYPES[info.dtype], list(info.shape))


def _external(name: str, array: np.ndarray, offset: int) -> onnx.TensorProto:
    tensor = TensorProto(name=name, data_type=helper.np_dtype_to_tensor_dtype(array.dtype), dims=array.shape)
    tensor.data_location = TensorProto.EXTERNAL
    for key, value in {"location": "weights.bin", "offset": offset, "length": array.nbytes}.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def tiny_model(
    flavour: Flavour,
    role: Literal["prefill", "decode"],
    weights: dict[str, np.ndarray],
    offsets: dict[str, int],
):
    dtype = weights["embed"].dtype
    builder = GraphBuilder(flavour, role, dtype.type)
    builder.build()
    inputs, outputs = _signature(flavour, role, str(dtype))
    used = {name for node in builder.nodes for name in node.input}
    initializers = [_external(name, weights[name], offsets[name]) for name in sorted(weights.keys() & used)]
    initializers += [
        numpy_helper.from_array(array, name) for name, array in sorted(builder.constants.items())
    ]
    if role == "prefill":
        initializers.append(numpy_helper.from_array(np.asarray(0, np.int64), "num_logits_to_keep"))
    graph = helper.make_graph(
        builder.nodes, role, [_value_info(t) for t in inputs], [_value_info(t) for t in outputs], initializers
    )
    opsets = [helper.make_opsetid("", 18), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8), inputs, outputs


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE with a few merges, so that characters and words cross token borders."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    specials = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)]
    )
    return tokenizer


def token_input(vocab_size: int, length: int) -> InputInfo:
    return InputInfo(
        kind="tokens",
        vocab_size=vocab_size,
        features=None,
        image=None,
        mean=None,
        std=None,
        length=length,
    )


def write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / "manifest.json").write_bytes(manifest.to_bytes())


def list_files(folder: Path) -> dict[str, FileInfo]:
    return {path.name: file_info(path) for path in sorted(folder.iterdir()) if path.name != "manifest.json"}


def write_bundle(
    folder: Path,
    flavour: Flavour,
    *,
    weights: dict[str, np.ndarray] | None = None,
    dtype: Literal["fp32", "fp16"] = "fp32",
    select: bool = False,
    extra_files: dict[str, bytes] | None = None,
) -> Manifest:
    """Write a whole bundle to an empty or missing folder."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = weights or tiny_weights()
    if dtype == "fp16":
        weights = {name: array.astype(np.float16) for name, array in weights.items()}
    offsets, blob = {}, bytearray()
    for name, array in weights.items():
        blob += bytes(-len(blob) % 64)
        offsets[name] = len(blob)
        blob += array.tobytes()
    (folder / "weights.bin").write_bytes(blob)
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str(), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    for name, data in (extra_files or {}).items():
        (folder / name).write_bytes(data)
    graphs = {}
    for role in ("prefill", "decode"):
        model, inputs, outputs = tiny_model(flavour, role, weights, offsets)
        (folder / f"{role}.onnx").write_bytes(model.SerializeToString(deterministic=True))
        graphs[role] = GraphInfo(file=f"{role}.onnx", inputs=tuple(inputs), outputs=tuple(outputs))
    if select:
        from tfmx.export.choice_graphs import sample_graph, select_graph
        from tfmx.export.manifest_writer import graph_info

        for role, graph in (("select", select_graph(VOCAB, 18)), ("sample", sample_graph(VOCAB, 18))):
            content = ir.to_proto(graph).SerializeToString(deterministic=True)
            (folder / f"{role}.onnx").write_bytes(content)
            graphs[role] = graph_info(role, graph)
    state = tuple(
        StateInfo(
            past=f"past_key_values.{i}.{part}",
            present=f"present.{i}.{part}",
            dtype="float16" if dtype == "fp16" else "float32",
            shape=("batch_size", H_KV, "past_sequence_length", D),
            growth=flavour,
        )
        for i in range(LAYERS)
        for part in ("key", "value")
    )
    manifest = Manifest(
        format=FORMAT,
        tfmx="0.1.0",
        tools={"onnx": onnx.__version__},
        source=SourceInfo(kind="python", files={}),
        kind="decoder",
        target="ort" if flavour == "capacity" else "portable",
        dtype=dtype,
        quant=None,
        opset=18,
        inputs=token_input(VOCAB, CONTEXT),
        outputs=OutputInfo(kind="tokens", name="logits", size=VOCAB, pooled=False, labels=None),
        vocab_size=VOCAB,
        max_context=CONTEXT,
        model=json.loads(json.dumps({"layers": LAYERS, "eps": EPS})),
        graphs=graphs,
        state=state,
        generation=GenerationInfo(
            bos_token_id=BOS,
            eos_token_ids=(EOS, IM_END),
            pad_token_id=None,
            decoder_start_token_id=None,
            sampling={},
        ),
        parity=None,
        quality=None,
        files=list_files(folder),
    )
    write_manifest(folder, manifest)
    return manifest
