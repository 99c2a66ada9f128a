"""Opening a bundle: whatever was changed, cut, added or lost is noticed and named."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_bundle import list_files, write_bundle, write_manifest

from tfmx import InputError, TfmxError
from tfmx.runtime import bundle as bundle_module
from tfmx.runtime import load
from tfmx.runtime.bundle import (
    Bundle,
    BundleError,
    BundleNotFoundError,
    FileInfo,
    GenerationInfo,
    Manifest,
    StateInfo,
    file_info,
)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bundle") / "original"
    write_bundle(folder, "capacity", extra_files={"config.json": b"{}\n"})
    return folder


@pytest.fixture
def folder(original, tmp_path):
    copy = tmp_path / "bundle"
    shutil.copytree(original, copy)
    return copy


def rewrite(folder: Path, change) -> None:
    """Change manifest.json's content behind its own back, with a right digest."""
    import hashlib

    content = json.loads((folder / "manifest.json").read_text())
    del content["manifest_sha256"]
    change(content)

    def canonical(data):
        return (json.dumps(data, sort_keys=True, indent=2, ensure_ascii=False) + "\n").encode()

    content["manifest_sha256"] = hashlib.sha256(canonical(content)).hexdigest()
    (folder / "manifest.json").write_bytes(canonical(content))


def test_a_whole_bundle_opens(folder):
    bundle = Bundle.open(folder)
    assert bundle.manifest.vocab_size == 320
    assert bundle.summary("decode").ops["com.microsoft.GroupQueryAttention"] == 2
    assert bundle.read("config.json") == b"{}\n"
    assert bundle.read("nothing.json") is None


def test_the_manifest_survives_the_way_through_json(folder):
    manifest = Bundle.open(folder).manifest
    data = manifest.to_bytes()
    assert Manifest.from_bytes(data) == manifest
    assert data.endswith(b"}\n")
    assert list(json.loads(data)) == sorted(json.loads(data))
    assert (folder / "manifest.json").read_bytes() == data


def test_a_thousand_flipped_bits_are_all_noticed_and_the_file_is_named(folder):
    rng = random.Random(0)
    files = sorted(folder.iterdir())
    for number in range(1000):
        path = files[number % len(files)]  # every file as often, the manifest too
        data = bytearray(path.read_bytes())
        place, bit = rng.randrange(len(data)), rng.randrange(8)
        data[place] ^= 1 << bit
        path.write_bytes(data)
        with pytest.raises(BundleError) as caught:
            Bundle.open(folder)
        assert path.name in str(caught.value), f"bit {bit} of byte {place}"
        assert "\n" not in str(caught.value)
        data[place] ^= 1 << bit
        path.write_bytes(data)
    Bundle.open(folder)


def test_every_bit_of_the_manifest_counts(folder):
    path = folder / "manifest.json"
    data = path.read_bytes()
    for place in range(0, len(data), 7):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            with pytest.raises(BundleError, match=r"manifest\.json"):
                Manifest.from_bytes(bytes(changed))


@pytest.mark.parametrize("name", ["weights.bin", "decode.onnx", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("check", [True, False])
def test_missing_truncated_and_grown_files_are_named(folder, name, check):
    path, data = folder / name, (folder / name).read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(
        BundleError, match=rf"{name} has {len(data) - 1} bytes, the manifest says {len(data)}"
    ):
        Bundle.open(folder, check=check)
    path.write_bytes(data + b"x")
    with pytest.raises(BundleError, match=rf"{name} has {len(data) + 1} bytes"):
        Bundle.open(folder, check=check)
    path.unlink()
    with pytest.raises(BundleError, match=rf"{name} is missing; copy the whole bundle or export it again$"):
        Bundle.open(folder, check=check)


def grown(folder: Path, name: str, size: int) -> None:
    """A file with a hole, which takes no room on the disk; the manifest says the size too."""
    os.truncate(folder / name, size)
    rewrite(folder, lambda content: content["files"][name].update(size=size))


@pytest.mark.parametrize("check", [True, False])
@pytest.mark.parametrize(
    ("name", "line"),
    [
        (
            "weights.bin",
            r"says 1,099,511,627,776 bytes, of which [\d,]+ are on the disk; copy or export",  # whatever the graphs declare
        ),
        (
            "tokenizer.json",
            r"has 1,099,511,627,776 bytes; the files beside weights\.bin may have 1,073,741,824",
        ),
        ("config.json", r"has 1,099,511,627,776 bytes; the files beside weights\.bin may have 1,073,741,824"),
        ("decode.onnx", r"has 1,099,511,627,776 bytes; the files beside weights\.bin may have 1,073,741,824"),
    ],
)
def test_a_file_of_a_terabyte_is_refused_before_a_byte_of_it_is_read(folder, monkeypatch, name, line, check):
    grown(folder, name, 1 << 40)
    summed = []
    monkeypatch.setattr(bundle_module, "file_info", summed.append)
    for opening in (lambda: Bundle.open(folder, check=check), lambda: load(folder, check=check, threads=1)):
        with pytest.raises(BundleError, match=rf"{re.escape(name)} {line}"):
            opening()
    assert summed == []


def test_weights_larger_than_the_graphs_tensors_are_refused_unread(folder, monkeypatch):
    grown(folder, "weights.bin", 1 << 30)
    monkeypatch.setattr(bundle_module, "file_info", None)
    with pytest.raises(
        BundleError, match=r"has 1,073,741,824 bytes, but the graphs' tensors take \d{2,3},\d{3}"
    ):
        Bundle.open(folder)


def test_weights_that_another_graph_asks_for_are_no_surprise(folder, monkeypatch):
    """The graphs that a run uses may not explain the size; then the others are asked before it is refused."""
    monkeypatch.setattr(bundle_module, "_PADDING", 0)
    bundle = Bundle.look(folder)
    used = bundle.summary("prefill").initializer_bytes
    grown(folder, "weights.bin", used + 1000)
    Bundle.open(folder, check=False)
    grown(folder, "weights.bin", 3 * used)
    with pytest.raises(BundleError, match="but the graphs' tensors take"):
        Bundle.open(folder, check=False)


def test_a_manifest_of_a_gigabyte_is_refused_unread(folder):
    os.truncate(folder / "manifest.json", 1 << 30)
    with pytest.raises(BundleError, match=r"manifest\.json is too large to be a manifest$"):
        Bundle.look(folder)


def test_an_extra_file_is_named(folder):
    (folder / "extra.py").write_text("")
    with pytest.raises(BundleError, match=r"extra\.py is not part of the bundle; remove it$"):
        Bundle.open(folder)


@pytest.mark.parametrize(
    "name",
    [".DS_Store", "._weights.bin", ".gitattributes", ".gitignore", ".git", ".nfs0001", "Thumbs.db", "desktop.ini", "Desktop.INI",  "README", "README.md", "readme.txt", "README.rst", "LICENSE", "LICENSE.txt", "licence.md", "NOTICE", "COPYING",
     "LICENSE-APACHE", "USE_POLICY.md", ".\udcff"],
)  # fmt: skip
def test_what_nothing_reads_is_let_be(folder, name):
    (folder / name).write_bytes(b"\xff")
    assert Bundle.open(folder).unlisted == (name,)
    (folder / name).unlink()
    assert Bundle.open(folder).unlisted == ()


@pytest.mark.parametrize("name", [".git", ".cache", ".ipynb_checkpoints"])
def test_a_hidden_folder_is_let_be_and_not_looked_into(folder, name):
    (folder / name / "objects").mkdir(parents=True)
    (folder / name / "objects" / "model.onnx").write_bytes(b"")
    assert Bundle.open(folder).unlisted == (name,)


@pytest.mark.parametrize(
    "name",
    ["model.onnx", "other.bin", "weights.bin.data", "genai_config.json", "vocab.json", "vocab.txt", "merges.txt", "spiece.model",
     "model.safetensors", "modeling.py", "golden2.npz", "template.jinja", "pytorch_model.bin.index.json", "x", "data", "README.json",
     "license.py", "README.onnx", "readme.txt.bin", "added_tokens.json", "custom_ops.so", "a.md.json"],
)  # fmt: skip
def test_what_some_loader_would_read_is_refused(folder, name):
    (folder / name).write_bytes(b"")
    with pytest.raises(BundleError, match=rf"{re.escape(name)} is not part of the bundle; remove it$"):
        Bundle.look(folder)


@pytest.mark.parametrize("name", ["README.md", ".gitattributes", ".DS_Store", "docs"])
@pytest.mark.parametrize("kind", ["link", "pipe", "broken link"])
def test_links_and_pipes_are_refused_under_any_name(folder, name, kind):
    if kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).symlink_to(folder / ("weights.bin" if kind == "link" else "nothing"))
    with pytest.raises(BundleError, match=rf"{re.escape(name)} is not part of the bundle"):
        Bundle.look(folder)


@pytest.mark.parametrize("name", ["README.md", "LICENSE", "onnx", "Thumbs.db"])
def test_a_folder_that_is_not_hidden_is_refused(folder, name):
    (folder / name).mkdir()
    with pytest.raises(BundleError, match=rf"{re.escape(name)} is not part of the bundle"):
        Bundle.look(folder)


def test_a_changed_file_passes_only_when_checks_are_off(folder):
    data = bytearray((folder / "tokenizer.json").read_bytes())
    data[100] ^= 1
    (folder / "tokenizer.json").write_bytes(data)
    with pytest.raises(
        BundleError,
        match=r"tokenizer\.json was changed after the export \(its sha256 differs\); copy or export it again$",
    ):
        Bundle.open(folder)
    assert Bundle.open(folder, check=False).read("tokenizer.json") == bytes(data)


def test_a_file_that_changes_after_opening_is_noticed_when_it_is_read(folder):
    bundle = Bundle.open(folder)
    data = (folder / "config.json").read_bytes()
    (folder / "config.json").write_bytes(b"[]\n"[: len(data)])
    with pytest.raises(BundleError, match=r"config\.json was changed"):
        bundle.read("config.json")


@pytest.mark.parametrize("kind", ["link", "folder", "pipe"])
@pytest.mark.parametrize("name", ["weights.bin", "manifest.json"])
def test_links_folders_and_pipes_are_refused_without_being_opened(folder, tmp_path, kind, name):
    path = folder / name
    shutil.move(path, tmp_path / "elsewhere")
    if kind == "link":
        path.symlink_to(tmp_path / "elsewhere")
    elif kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path)
    with pytest.raises(BundleError, match=rf"{name} is not a plain file"):
        Bundle.open(folder)


def test_a_path_that_is_no_bundle_says_what_to_do(tmp_path):
    for path, line in [
        (tmp_path / "nowhere", "does not exist; `tfmx export SOURCE -o"),
        (tmp_path / "file", "is not a folder; give the folder that `tfmx export` wrote$"),
        (tmp_path, r"has no manifest\.json, so it is no bundle"),
    ]:
        (tmp_path / "file").write_text("")
        with pytest.raises(BundleNotFoundError, match=line) as caught:
            Bundle.open(path)
        assert isinstance(caught.value, InputError)  # exit code 2
    assert not issubclass(BundleError, InputError)  # exit code 1
    assert issubclass(BundleError, TfmxError)


@pytest.mark.parametrize("found", [0, 1, 2, 4, "3", None, True, 3.0])
def test_another_format_is_refused(folder, found):
    rewrite(folder, lambda content: content.update(format=found))
    with pytest.raises(
        BundleError, match=r"manifest\.json has format .*, this tfmx reads 3; export it again$"
    ):
        Bundle.open(folder)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda c: c.pop("opset"), r"opset is missing$"),
        (lambda c: c.update(surprise=1), r"surprise is not a known key$"),
        (lambda c: c["graphs"]["decode"].pop("file"), r"graphs\.decode\.file is missing$"),
        (
            lambda c: c["graphs"]["decode"]["inputs"][0].update(dtype="int16"),
            r"graphs\.decode\.inputs\[0\]\.dtype is 'int16', expected",
        ),
        (lambda c: c.update(vocab_size="320"), r"vocab_size is '320', expected a whole number$"),
        (lambda c: c.update(vocab_size=True), r"vocab_size is True, expected a whole number$"),
        (
            lambda c: c.update(vocab_size=0),
            r"vocab_size and max_context must be at least 1, and below 2\^31$",
        ),
        (
            lambda c: c.update(max_context=2**31),
            r"vocab_size and max_context must be at least 1, and below 2\^31$",
        ),
        (lambda c: c.update(files=[]), r"files is \[\], expected an object$"),
        (
            lambda c: c["files"].update({"../x": c["files"]["weights.bin"]}),
            r"names the file '\.\./x'; a bundle's files have bare names$",
        ),
        (lambda c: c["files"].update({"a/b": c["files"]["weights.bin"]}), r"bare names$"),
        (lambda c: c["files"].update({"C:x": c["files"]["weights.bin"]}), r"bare names$"),
        (lambda c: c["files"].update({"..": c["files"]["weights.bin"]}), r"bare names$"),
        (lambda c: c["files"]["weights.bin"].update(sha256="0" * 63), r"which cannot be$"),
        (lambda c: c["files"]["weights.bin"].update(size=-1), r"which cannot be$"),
        (
            lambda c: c["generation"].update(bos_token_id=320),
            r"generation names token 320, the vocabulary has 320$",
        ),
        (lambda c: c["generation"].update(eos_token_ids=[-1]), r"generation names token -1"),
        (lambda c: c["graphs"].pop("prefill"), r"graphs are \['decode'\], expected decode and prefill"),
        (
            lambda c: c["graphs"]["decode"].update(file="x.onnx"),
            r"the decode graph's file 'x\.onnx' is not among the files$",
        ),
        (lambda c: c["state"][0].update(growth="append"), r"state mixes growth append and capacity$"),
        (
            lambda c: c["state"][0].update(dtype="float16"),
            r"the prefill graph and the state disagree about past_key_values\.0\.key$",
        ),
        (
            lambda c: c["state"][0].update(past="nothing"),
            r"the prefill graph lacks nothing of the state$",
        ),
        (lambda c: c["state"][0].update(growth="constant"), r"of growth constant has the shape"),
        (lambda c: c["state"][0].update(shape=[1, 2, "p", 4]), r"must begin with batch_size"),
        (
            lambda c: c["graphs"]["decode"]["outputs"].pop(0),
            r"the decode graph must give float32 logits of 3 dimensions$",
        ),
        (
            lambda c: c["graphs"]["decode"]["inputs"].append(c["graphs"]["decode"]["inputs"][0]),
            r"names an input or output twice$",
        ),
        (
            lambda c: c["graphs"]["decode"]["inputs"][0].update(shape=["batch_size", -1]),
            r"decode graph, input_ids has the shape",
        ),
        (lambda c: c.update(target="cuda"), r"target is 'cuda', expected 'ort' or 'portable'$"),
        (lambda c: c.update(parity=3), r"parity is 3, expected an object$"),
        (lambda c: c.update(quality={"tokens": "9"}), r"quality\['tokens'\] is '9', which cannot be$"),
        (lambda c: c.update(quality={"windows": True}), r"quality\['windows'\] is True"),
        (lambda c: c.update(quality={"window": -1}), r"quality\['window'\] is -1"),
        (lambda c: c.update(quality={"runtime": None}), r"quality\['runtime'\] is None"),
        (lambda c: c.update(quality={"source": {"a": 1}}), r"quality\['source'\] is \{'a': 1\}"),
        (lambda c: c.update(quality={"kl_max": "0.1"}), r"quality\['kl_max'\] is '0\.1'"),
        (lambda c: c.update(quality={"top_1": 0.9}), r"quality\['top_1'\] is 0\.9"),
        (lambda c: c.update(quality={"top_1": {"value": 0.9}}), r"quality\['top_1'\] is \{'value': 0\.9\}"),
        (lambda c: c.update(quality={"top_1": {"value": 1, "error": "0"}}), r"quality\['top_1'\] is"),
        (lambda c: c.update(quality={"top_1": {"value": 10**400, "error": 0}}), r"quality\['top_1'\] is"),
        (lambda c: c.update(quality={"a\nb": 1}), r"quality\['a\\nb'\] is 1, which cannot be$"),
    ],
)
def test_a_manifest_that_cannot_be_right_names_what_is_wrong(folder, change, line):
    rewrite(folder, change)
    with pytest.raises(BundleError, match=line) as caught:
        Bundle.open(folder)
    assert "manifest.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b"null", b'{"format": NaN}', b"\xff", b"[" * 100_000, b'"\\ud800"']
)
def test_a_manifest_that_is_no_manifest_is_an_error(folder, data):
    (folder / "manifest.json").write_bytes(data)
    with pytest.raises(BundleError, match=r"manifest\.json") as caught:
        Bundle.open(folder)
    assert "\n" not in str(caught.value)


def test_a_manifest_edited_by_hand_is_noticed(folder):
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"vocab_size": 320', '"vocab_size": 321'))
    with pytest.raises(BundleError, match=r"manifest\.json was changed after the export"):
        Bundle.open(folder)
    content = json.loads(path.read_text().replace("321", "320"))
    path.write_text(json.dumps(content))  # the same content, spelled otherwise
    with pytest.raises(BundleError, match=r"manifest\.json was changed after the export"):
        Bundle.open(folder)


def test_a_manifest_object_cannot_be_made_wrong(folder):
    manifest = Bundle.open(folder).manifest
    with pytest.raises(BundleError, match="vocab_size"):
        replace(manifest, vocab_size=0)
    with pytest.raises(BundleError, match="lacks"):
        replace(
            manifest,
            state=(
                StateInfo(past="a", present="b", dtype="float32", shape=("batch_size", "p"), growth="append"),
            ),
        )
    with pytest.raises(BundleError, match="names token 999"):
        replace(
            manifest,
            generation=GenerationInfo(
                bos_token_id=999,
                eos_token_ids=(),
                pad_token_id=None,
                decoder_start_token_id=None,
                sampling={},
            ),
        )
    with pytest.raises(BundleError, match="cannot be"):
        FileInfo(size=1, sha256="xyz")


def test_file_info_reads_in_blocks(tmp_path):
    import hashlib

    data = os.urandom(9_000_001)
    (tmp_path / "f").write_bytes(data)
    assert file_info(tmp_path / "f") == FileInfo(size=len(data), sha256=hashlib.sha256(data).hexdigest())
    with pytest.raises(BundleError, match=r"missing cannot be read: No such file"):
        file_info(tmp_path / "missing")


CASE = {"name": "ü", "error": 1e-6, "budget": 2.5e-6, "ratio": 1, "argmax_agreement": 1.0}
PARITY = {
    "rule": "r",
    "reference": "torch",
    "runtime": "ort",
    "passed": True,
    "worst_ratio": 1.5,
    "cases": [CASE],
}


@pytest.mark.parametrize(
    ("parity", "line"),
    [
        ({"cases": None}, r"parity has the keys \['cases'\], expected \['cases', 'passed', 'reference', "),
        ({}, r"parity has the keys \[\]"),
        ({**PARITY, "more": 1}, r"parity has the keys "),
        ({**PARITY, "cases": None}, r"parity\.cases is None, which cannot be$"),
        ({**PARITY, "cases": 3}, r"parity\.cases is 3, which cannot be$"),
        ({**PARITY, "cases": {"a": 1}}, r"parity\.cases is \{'a': 1\}, which cannot be$"),
        ({**PARITY, "cases": [CASE, None]}, r"parity\.cases is \["),
        ({**PARITY, "cases": [{"name": "x"}]}, r"parity\.cases is \["),
        ({**PARITY, "cases": [{**CASE, "name": 1}]}, r"parity\.cases is \["),
        ({**PARITY, "cases": [{**CASE, "error": "0"}]}, r"parity\.cases is \["),
        ({**PARITY, "passed": 1}, r"parity\.passed is 1, which cannot be$"),
        ({**PARITY, "rule": None}, r"parity\.rule is None, which cannot be$"),
        ({**PARITY, "worst_ratio": 10**400}, r"parity\.worst_ratio is 10+, which cannot be$"),
        ({**PARITY, "rounding": None}, r"parity\.rounding is None, which cannot be$"),
        ({**PARITY, "rounding": {"cases": None}}, r"parity\.rounding has the keys \['cases'\]"),
        ({**PARITY, "rounding": {**PARITY, "rounding": PARITY}}, r"parity\.rounding\.rounding is \{"),
    ],
)
def test_a_parity_that_the_gate_has_not_written_is_refused(folder, parity, line):
    rewrite(folder, lambda content: content.update(parity=parity))
    with pytest.raises(BundleError, match=line):
        Bundle.open(folder)


def test_a_bundle_may_have_a_certificate_and_free_parts(folder):
    quality = {"runtime": "onnxruntime", "tokens": 9, "source": {"a": "00"}, "kl_max": 0.5}
    quality |= {"kl_mean": {"value": 0.25, "error": 0}}
    manifest = replace(
        Bundle.open(folder).manifest,
        parity={**PARITY, "rounding": {**PARITY, "cases": []}},
        model={"a": {"b": [1]}},
        quality=quality,
    )
    write_manifest(folder, manifest)
    assert Bundle.open(folder).manifest == manifest
    assert list_files(folder) == manifest.files


def test_opening_needs_neither_onnxruntime_nor_numpy(folder):
    code = f"""
import sys
from tfmx.runtime.bundle import Bundle
Bundle.open({str(folder)!r})
print(sorted({{"numpy", "onnxruntime", "onnx", "torch", "tokenizers", "click"}} & set(sys.modules)))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_the_runtime_turns_telemetry_off():
    code = "import os; os.environ['ORT_DISABLE_TELEMETRY'] = '0'; import tfmx.runtime; print(os.environ['ORT_DISABLE_TELEMETRY'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1"


def test_the_graphs_that_choose_tokens_come_together(tmp_path):
    write_bundle(tmp_path / "b", "capacity", select=True)
    Bundle.open(tmp_path / "b")
    rewrite(tmp_path / "b", lambda content: content["graphs"].pop("sample"))
    with pytest.raises(BundleError, match="select and sample come together"):
        Bundle.open(tmp_path / "b")
