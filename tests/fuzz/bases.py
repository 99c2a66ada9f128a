"""The bundles that mutants are made from: one of every kind that tfmx writes, tiny, each with golden vectors.

Some are written by hand (`tiny_bundle`, `tiny_kinds`), which costs nothing; the rest are real exports, about 2 s each, so
they are kept in `.cache/fuzz` under a hash of the sources. Golden vectors expect zeros and allow any difference:
`tfmx verify` then runs every graph, also the decode graph, which `tfmx run` needs for recurrent models alone.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from fuzz import checkpoint_bases
from fuzz.checkpoint_bases import Files
from fuzz.draft import Draft

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "fuzz"
B, T, STEPS = 2, 5, 2  # of the golden case
TARGET = 2  # ids that the decoder of an encoder-decoder has said
ANY_DIFFERENCE = 1e30

# name: what follows `tfmx export`; presets that between them have every mixer, head, position and storage
_EXPORTS: dict[str, tuple[str, ...]] = {
    "rotary, fused": ("preset:decoder",),
    "rotary, fused, int4": ("preset:decoder", "--quant", "int4", "--quant-block", "16", "--quant-round", "nearest"),
    "rotary, portable, int4": (
        "preset:decoder", "--quant", "int4", "--quant-block", "16", "--quant-round", "nearest", "--quant-zero-points", "--target", "portable",
    ),
    "rotary, int8 cache": ("preset:decoder", "--quant", "int8", "--quant-block", "16", "--quant-round", "nearest", "--kv", "int8"),
    "portable, fp16": ("preset:language-model", "--target", "portable", "--dtype", "fp16"),
    "fused, fp16": ("preset:decoder", "--dtype", "fp16"),
    "t5 bias": ("preset:t5-bias", "--target", "portable"),
    "attention maps": ("preset:attention-maps",),
    "random features": ("preset:random-features",),
    "lstm": ("preset:lstm",),
    "ablated lstm": ("preset:ablated-lstm-regressor",),
    "encoder-decoder": ("preset:encoder-decoder",),
    "captioner": ("preset:captioner", "--target", "portable"),
    "pooled encoder": ("preset:max-pooled",),
    "opset 23": ("preset:relative", "--target", "portable", "--opset", "23"),
}  # fmt: skip


def _handmade() -> dict[str, Callable[[Path], object]]:
    import tiny_bundle
    import tiny_kinds

    return {
        "by hand: append": lambda folder: tiny_bundle.write_bundle(folder, "append"),
        "by hand: capacity": lambda folder: tiny_bundle.write_bundle(folder, "capacity", select=True),
        "by hand: tokens": tiny_kinds.write_token_classifier,
        "by hand: vectors": tiny_kinds.write_vector_regressor,
        "by hand: image": tiny_kinds.write_image_classifier,
        "by hand: recurrent": tiny_kinds.write_recurrent_regressor,
        "by hand: fused vectors": tiny_kinds.write_fused_regressor,
        "by hand: pair": tiny_kinds.write_encoder_decoder,
    }


def base_folder() -> Path:
    """A folder with a bundle for each base, made if this state of the sources has none yet."""
    folder = CACHE / f"bases-{_source_hash()}"
    if folder.exists():
        return folder
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in CACHE.glob("bases-*"):
        shutil.rmtree(old, ignore_errors=True)
    fresh = Path(tempfile.mkdtemp(dir=CACHE))
    try:
        _make_bases(fresh)
        try:
            fresh.rename(folder)
        except OSError:  # another process was first, and its bundles are the same
            if not folder.exists():
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return folder


def read_checkpoints(folder: Path) -> dict[str, Files]:
    return checkpoint_bases.read_checkpoints(folder / "checkpoints")


def read_bases(folder: Path) -> dict[str, Draft]:
    names = json.loads((folder / "names.json").read_text())
    return {name: Draft.read(name, folder / str(index)) for index, name in enumerate(names)}


def _make_bases(folder: Path) -> None:
    from command_line import tfmx

    handmade = _handmade()
    for index, name in enumerate([*handmade, *_EXPORTS]):
        place = folder / str(index)
        if name in handmade:
            handmade[name](place)
        else:
            done = tfmx("export", *_EXPORTS[name], "-o", place, "--no-verify")
            assert done.code == 0, (name, done)
        draft = Draft.read(name, place)
        draft.files["golden.npz"] = golden_vectors(draft.manifest)
        draft.write(place)
    checkpoint_bases.write_checkpoints(folder / "checkpoints")
    (folder / "names.json").write_text(json.dumps([*handmade, *_EXPORTS]))


def golden_vectors(manifest: dict) -> bytes:
    """One case for any kind of bundle, which runs each of its graphs."""
    rng = np.random.default_rng(0)
    kind, inputs, outputs = manifest["kind"], manifest["inputs"], manifest["outputs"]
    size = outputs["size"]
    if inputs["kind"] == "images":
        arrays = {"pixel_values": rng.standard_normal((B, *inputs["image"])).astype(np.float32)}
    elif inputs["kind"] == "vectors":
        arrays = {"input_features": rng.standard_normal((B, T, inputs["features"])).astype(np.float32)}
    else:
        arrays = {"input_ids": rng.integers(0, inputs["vocab_size"], (B, T))}
    if inputs["kind"] != "images":
        arrays["attention_mask"] = np.asarray([[1] * T, [0, 0] + [1] * (T - 2)])
    if kind == "encoder":
        length = inputs["length"] if inputs["kind"] == "images" else T
        expected = (B, size) if outputs["pooled"] else (B, length, size)
    else:
        expected = (1 + STEPS, B, size)
        if kind == "decoder" and inputs["kind"] == "vectors":
            arrays["decode_features"] = rng.standard_normal((STEPS, B, inputs["features"])).astype(np.float32)
        else:
            arrays["decode_ids"] = rng.integers(0, outputs["size"], (STEPS, B))
    if kind == "encoder-decoder":
        arrays["target_ids"] = rng.integers(0, outputs["size"], (B, TARGET))
    arrays |= {"expected": np.zeros(expected, np.float32), "budget": np.asarray(ANY_DIFFERENCE)}
    file = io.BytesIO()
    np.savez(file, **{f"case.{name}": array for name, array in arrays.items()})
    return file.getvalue()


def _source_hash() -> str:
    """Of all that decides what an export writes, and of what writes the others."""
    files = [path for name in ("tfm_model", "export", "runtime") for path in (ROOT / name).rglob("*.py")]
    files += [Path(__file__), Path(checkpoint_bases.__file__), *ROOT.glob("tests/tiny_*.py")]
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()[:16]
