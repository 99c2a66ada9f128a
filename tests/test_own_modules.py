"""Anybody's nn.Module: the worked example, and what is said about modules that do not follow the protocol."""

from __future__ import annotations

import re
from pathlib import Path

import onnx
import pytest
import torch

import tfmx
from tfmx import InputError, TfmxError
from tfmx.export.parity import ParityError
from tfmx.export.pipeline import ExportOptions, export
from tfmx.runtime.bundle import Bundle

EXAMPLE = Path(__file__).parents[1] / "examples" / "own" / "gpt.py"


@pytest.mark.parametrize("target", ["ort", "portable"])
@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_the_example_exports_and_generates_what_pytorch_does(target: str, dtype: str, tmp_path: Path) -> None:
    parity = export(f"{EXAMPLE}:build", tmp_path / "bundle", ExportOptions(target=target, dtype=dtype))
    assert parity is not None
    assert parity.passed
    if dtype == "fp32":
        with tfmx.load(tmp_path / "bundle") as model:
            tokens = [step.token_id for step in model.generate([1, 2, 3], max_new_tokens=64)]
        assert tokens == greedy_in_torch([1, 2, 3], 64)
    size = (tmp_path / "bundle" / "weights.bin").stat().st_size
    parameters = sum(p.numel() for p in example().parameters())
    assert (
        size < parameters * (4 if dtype == "fp32" else 2) + 64 * 4096
    )  # both graphs and the head share them


def example() -> torch.nn.Module:
    scope: dict[str, object] = {"__name__": "example"}
    exec(compile(EXAMPLE.read_text(), EXAMPLE, "exec"), scope)
    return scope["build"]().eval()  # type: ignore[operator]


def greedy_in_torch(ids: list[int], count: int) -> list[int]:
    module = example()
    state = [torch.zeros(1, 4, 0, 16) for _ in module.state_spec()]
    new, answer = torch.tensor([ids]), []
    with torch.no_grad():
        for step in range(count):
            past = state[0].shape[2]
            positions = torch.arange(past, past + new.shape[1])[None]
            logits, state = module(
                new, torch.ones(1, past + new.shape[1], dtype=torch.int64), positions, state
            )
            answer.append(int(logits[0, -1].argmax()))
            new = torch.tensor([[answer[step]]])
    return answer


def test_the_modules_ops_are_checked_against_what_the_runtime_accepts(tmp_path: Path) -> None:
    export(f"{EXAMPLE}:build", tmp_path / "bundle", ExportOptions(verify=False))
    Bundle.open(tmp_path / "bundle")
    model = onnx.load(tmp_path / "bundle" / "prefill.onnx", load_external_data=False)
    assert "If" not in {node.op_type for node in model.graph.node}


TOY = """
import torch
from torch import nn
from tfmx.tfm_model.state import StateTensor

class Toy(nn.Module):
    vocab_size = 11
    max_context = 32
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 11)
    def state_spec(self):
        return (StateTensor(past="past_sum", present="present_sum", shape=("batch_size", 11), growth="constant"),)
    def forward(self, input_ids, attention_mask, position_ids, state):
        real = attention_mask[:, -input_ids.shape[1]:, None].to(state[0].dtype)
        sums = state[0][:, None] + (self.table(input_ids) * real).cumsum(1)
        return sums, [sums[:, -1]]

def build():
    torch.manual_seed(3)
    return Toy()
"""


def write(tmp_path: Path, text: str) -> str:
    path = tmp_path / "model.py"
    path.write_text(text)
    return f"{path}:build"


def test_a_recurrent_state_of_constant_size_exports_and_runs(tmp_path: Path) -> None:
    parity = export(write(tmp_path, TOY), tmp_path / "bundle", ExportOptions(target="portable"))
    assert parity is not None
    assert parity.passed
    with tfmx.load(tmp_path / "bundle") as model:
        assert len(list(model.generate([1, 2], max_new_tokens=5))) == 5


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("vocab_size = 11", "pass"), "has no vocab_size"),
        (("def state_spec", "def other"), "has no state_spec"),
        (
            ("    return Toy()", "    raise OSError('no checkpoint')"),
            "build in .* failed: OSError: no checkpoint",
        ),
        (("def build", "def make"), "has no function 'build'; it has"),
        (("import torch\n", "import a_missing_package\n"), "running .* failed: ModuleNotFoundError"),
        (('("batch_size", 11)', '(11, "batch_size")'), "wanted batch_size first"),
        (('growth="constant"', 'growth="capacity"'), "growth 'capacity'"),
    ],
)
def test_a_module_off_the_protocol_is_refused_in_one_line(change, message: str, tmp_path: Path) -> None:
    assert change[0] in TOY
    with pytest.raises(InputError) as caught:
        export(write(tmp_path, TOY.replace(*change)), tmp_path / "bundle", ExportOptions())
    assert re.search(message, str(caught.value)), str(caught.value)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "bundle").exists()


def test_a_module_that_torch_cannot_trace_is_an_error_in_one_line(tmp_path: Path) -> None:
    text = TOY.replace(
        "        real =", "        if input_ids.sum() > 5: input_ids = input_ids * 1\n        real ="
    )
    with pytest.raises(TfmxError, match="torch could not trace the module: ") as caught:
        export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())
    assert "\n" not in str(caught.value)


def test_a_module_whose_trace_bakes_something_in_fails_the_gate(tmp_path: Path) -> None:
    text = TOY.replace("cumsum(1)", "cumsum(1) * float(torch.onnx.is_in_onnx_export() or 1.001)")
    with pytest.raises(ParityError, match="parity failed"):
        export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())
    assert not (tmp_path / "bundle").exists()


PLAIN_CLASS = """    return Plain()

class Plain:
    vocab_size = max_context = 8
    def state_spec(self):
        return ()
"""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("        real =", "        raise OSError('no')\n        real ="), "forward of Toy failed on an input of shape .2, 5.: OSError: no"),
        (("max_context = 32", "max_context = 1"), "context is 1, wanted at least 2"),
        (("max_context = 32", "max_context = 'long'"), "max_context is 'long', wanted a whole number"),
        (("max_context = 32", "max_context = 32\n    eos_token_ids = 2"), "eos_token_ids is 2, wanted a list"),
        (("    return Toy()", PLAIN_CLASS), "returns a Plain, wanted a torch.nn.Module"),
        (("return (StateTensor(", "return None and (StateTensor("), "state_spec gives None, wanted a tuple"),
    ],
)  # fmt: skip
def test_what_a_module_does_wrong_is_one_line(change, message: str, tmp_path: Path) -> None:
    assert change[0] in TOY
    with pytest.raises(TfmxError, match=message) as caught:
        export(write(tmp_path, TOY.replace(*change)), tmp_path / "bundle", ExportOptions())
    assert "\n" not in str(caught.value)


def test_a_subclass_of_transformer_is_refused_since_its_changes_would_be_lost(tmp_path: Path) -> None:
    text = """
from tfmx.tfm_model.presets import PRESETS
from tfmx.tfm_model.transformer import Transformer

class Mine(Transformer):
    pass

def build():
    return Mine(PRESETS["decoder"])
"""
    with pytest.raises(InputError, match="Mine is a subclass of Transformer"):
        export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())
    text = text.replace("return Mine(", "return Transformer(")
    parity_of(tmp_path, text, "ort")


def test_max_context_is_the_modules_own(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="says its max_context itself"):
        export(write(tmp_path, TOY), tmp_path / "bundle", ExportOptions(max_context=16))


def test_opset_17_is_for_built_in_decoders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="traced at 18 or above"):
        export(write(tmp_path, TOY), tmp_path / "bundle", ExportOptions(opset=17))


def parity_of(tmp_path: Path, text: str, target: str = "portable") -> None:
    parity = export(write(tmp_path, text), tmp_path / "bundle", ExportOptions(target=target))
    assert parity is not None
    assert parity.passed


def test_a_module_may_import_what_lies_beside_it(tmp_path: Path) -> None:
    (tmp_path / "tfmx_test_sibling.py").write_text("SIZE = 11\n")
    text = TOY.replace("vocab_size = 11", "vocab_size = tfmx_test_sibling.SIZE")
    parity_of(tmp_path, text.replace("import torch\n", "import torch\nimport tfmx_test_sibling\n", 1))


def test_a_file_that_changed_is_run_again(tmp_path: Path) -> None:
    parity_of(tmp_path, TOY)
    before = (tmp_path / "bundle" / "weights.bin").read_bytes()
    parity_of(tmp_path, TOY.replace("manual_seed(3)", "manual_seed(4)"))
    assert (tmp_path / "bundle" / "weights.bin").read_bytes() != before


def test_large_buffers_of_other_types_are_stored(tmp_path: Path) -> None:
    buffers = """
        self.register_buffer("flags", torch.ones(40, 40, dtype=torch.bool))
        self.register_buffer("counts", torch.ones(40, 40, dtype=torch.int32))
        self.register_buffer("columns", torch.ones(40, 40))
"""
    text = TOY.replace(
        "        self.table = nn.Embedding(11, 11)\n", "        self.table = nn.Embedding(11, 11)" + buffers
    )
    sums = "sums = (self.flags.sum() / 1600 + self.counts.sum() / 1600 - self.columns.mean()) * ("
    text = text.replace("sums = state[0]", sums + "state[0]").replace(".cumsum(1)", ".cumsum(1))")
    parity_of(tmp_path, text)


def test_a_weight_that_is_used_in_two_ways_is_right_in_both(tmp_path: Path) -> None:
    text = TOY.replace(
        "self.table(input_ids)",
        "ops.linear(self.table(input_ids), self.table.weight, None) @ self.table.weight",
    )
    text = text.replace("import torch\n", "import torch\nfrom tfmx.tfm_model import ops\n", 1)
    for target in ("portable", "ort"):
        parity_of(tmp_path, text, target)


def test_a_weight_may_be_computed(tmp_path: Path) -> None:
    text = TOY.replace(
        "self.table(input_ids)", "ops.linear(self.table(input_ids), self.table.weight * 0.5, None)"
    )
    parity_of(tmp_path, text.replace("import torch\n", "import torch\nfrom tfmx.tfm_model import ops\n", 1))


def test_a_module_without_state_exports(tmp_path: Path) -> None:
    text = TOY.replace(
        'return (StateTensor(past="past_sum", present="present_sum", shape=("batch_size", 11), growth="constant"),)',
        "return ()",
    )
    text = text.replace(
        "sums = state[0][:, None] + (self.table(input_ids) * real).cumsum(1)", "sums = self.table(input_ids)"
    )
    text = text.replace("state[0].dtype", "torch.float32").replace("[sums[:, -1]]", "[]")
    parity_of(tmp_path, text)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("[sums[:, -1]]", "[]"), "returns 0 state tensors, its state_spec has 1"),
        (
            ('("batch_size", 11)', '("batch_size", "heads")'),
            "wanted batch_size first, then numbers and no other open dimension",
        ),
        (
            (
                "nn.Embedding(11, 11)\n",
                "nn.Embedding(11, 11)\n        self.freqs_cis = nn.Buffer(torch.ones(3) * 1j)\n",
            ),
            "freqs_cis is complex",
        ),
    ],
)
def test_what_cannot_be_exported_is_named(change, message: str, tmp_path: Path) -> None:
    assert change[0] in TOY
    with pytest.raises(InputError, match=message):
        export(write(tmp_path, TOY.replace(*change)), tmp_path / "bundle", ExportOptions())
