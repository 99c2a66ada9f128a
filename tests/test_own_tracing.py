"""Own modules that torch can and cannot trace: PyTorch's attention, closures, what stays in training, what is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from test_own_modules import EXAMPLE, TOY, write
from torch import nn

from tfmx import InputError, TfmxError
from tfmx.cli.boundary import explain
from tfmx.export.held_module import HeldModule
from tfmx.export.pipeline import ExportOptions, export
from tfmx.export.user_code import told

ATTENTION = "F.scaled_dot_product_attention(q, key, value, attn_mask=seen[:, None])"


def exports(tmp_path: Path, text: str, target: str = "portable", dtype: str = "fp32") -> None:
    parity = export(write(tmp_path, text), tmp_path / "bundle", ExportOptions(target=target, dtype=dtype))
    assert parity is not None
    assert parity.passed


def refused(tmp_path: Path, text: str) -> str:
    with pytest.raises(TfmxError) as caught:
        export(write(tmp_path, text), tmp_path / "bundle", ExportOptions())
    line, code = explain(caught.value)
    assert "\n" not in line
    assert "\x1b" not in line
    assert "internal error" not in line
    assert code == (2 if isinstance(caught.value, InputError) else 1)
    assert not (tmp_path / "bundle").exists()
    return line


# --- attention ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("target", "dtype"), [("ort", "fp32"), ("portable", "fp16")])
@pytest.mark.parametrize(
    "mask",
    [
        "torch.where(seen[:, None], 0.0, float('-inf')).to(q.dtype)",
        "torch.zeros_like(seen[:, None], dtype=q.dtype).masked_fill(~seen[:, None], torch.finfo(q.dtype).min)",
    ],
    ids=["-inf", "lowest"],
)
def test_a_mask_of_numbers(mask: str, target, dtype, tmp_path: Path) -> None:
    text = EXAMPLE.read_text()
    assert ATTENTION in text  # whose mask is of truth values: tests/test_own_modules.py
    exports(tmp_path, text.replace("attn_mask=seen[:, None]", f"attn_mask={mask}"), target, dtype)


@pytest.mark.parametrize(("target", "dtype"), [("ort", "fp16"), ("portable", "fp32")])
def test_heads_that_share_keys_and_a_scale_of_its_own(target, dtype, tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace(
        ATTENTION,
        "F.scaled_dot_product_attention(q, key[:, ::2], value[:, ::2], attn_mask=seen[:, None], "
        "enable_gqa=True, scale=0.3, dropout_p=0.0)",
    )
    exports(tmp_path, text, target, dtype)


CAUSAL = TOY.replace(
    "sums = state[0][:, None] + (self.table(input_ids) * real).cumsum(1)",
    "x = self.table(input_ids)[:, None]\n"
    "        sums = state[0][:, None] + torch.nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]",
)


def test_is_causal_without_a_past_is_what_pytorch_does(tmp_path: Path) -> None:
    """Its state is the last answer, so that as a decoder it is wrong, which is not asked here."""
    from tfmx.export.parity import Gate
    from tfmx.export.pipeline import DTYPES, write_files
    from tfmx.export.progress import Silent
    from tfmx.export.source import open_source

    source = open_source(write(tmp_path, CAUSAL), DTYPES["fp32"], None)
    (tmp_path / "graphs").mkdir()
    write_files(tmp_path / "graphs", source.graphs("portable", 18, Silent()), source, Silent())
    assert Gate(source.reference(), Silent()).check(tmp_path / "graphs", "append").passed


# --- one module, converted in place ----------------------------------------------------------------------------


def test_closures_over_submodules_export_from_training_mode(tmp_path: Path) -> None:
    text = EXAMPLE.read_text().replace(
        "        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))\n",
        "        self.mlp = nn.ModuleDict(dict(c_fc=nn.Linear(WIDTH, 256), c_proj=nn.Linear(256, WIDTH), act=nn.GELU(),\n"
        "                                      dropout=nn.Dropout(0.1)))\n"
        "        m = self.mlp\n"
        "        self.mlpf = lambda x: m.dropout(m.c_proj(m.act(m.c_fc(x))))\n",
    )
    exports(tmp_path, text.replace("self.mlp(self.norm2(x))", "self.mlpf(self.norm2(x))"), "ort")


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(3), persistent=False)
        self.kept: torch.Tensor | None = None
        self.seen: list[torch.dtype] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.scale if self.kept is None else self.kept
        self.scale += 1
        self.seen.append(x.dtype)
        return self.second(self.first(x)) * self.kept


def test_a_held_module_is_put_back_as_it_was() -> None:
    module = Keeping()
    held, before = HeldModule(module), {name: t.clone() for name, t in module.state_dict().items()}
    for dtype in (torch.float64, torch.float16, torch.float32):
        with held.converted(lambda _, tensor, dtype=dtype: tensor.to(dtype)) as converted:
            assert converted.second.weight is converted.first.weight
            assert converted(torch.ones(1, 3, dtype=dtype)).dtype == dtype
            assert not converted.training
        assert module.training
        assert module.kept is None
        assert module.seen == []
        assert torch.equal(module.scale, torch.ones(3))
        assert all(torch.equal(tensor, before[name]) for name, tensor in module.state_dict().items())


def test_a_plain_tensor_that_stays_behind_is_named(tmp_path: Path) -> None:
    text = TOY.replace("nn.Embedding(11, 11)\n", "nn.Embedding(11, 11)\n        self.mix = torch.eye(11)\n")
    line = refused(tmp_path, text.replace("self.table(input_ids)", "(self.table(input_ids) @ self.mix)"))
    assert "mix (float32) a buffer with register_buffer" in line
    assert "model.py:" in line


# --- eval mode ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("new", "said"),
    [
        ("torch.nn.functional.dropout(self.table(input_ids))", "draws random numbers"),
        ("(self.table(input_ids) + torch.rand(11))", "draws random numbers"),
        (
            "torch.nn.functional.batch_norm(self.table(input_ids).mT, torch.zeros(11), torch.ones(11), training=True).mT",
            "normalises by the batch's own mean",
        ),
    ],
)
def test_what_is_left_in_training_is_refused_with_its_line(new: str, said: str, tmp_path: Path) -> None:
    line = refused(tmp_path, TOY.replace("self.table(input_ids)", new))
    assert said in line
    assert "model.py:16 `sums = " in line
    assert "training=self.training" in line


def test_a_module_that_cannot_be_put_into_eval_mode_is_named(tmp_path: Path) -> None:
    stubborn = (
        "class Stubborn(nn.Dropout):\n    def train(self, mode=True):\n        return self\n\nclass Toy("
    )
    text = TOY.replace("class Toy(", stubborn)
    text = text.replace("nn.Embedding(11, 11)\n", "nn.Embedding(11, 11)\n        self.drop = Stubborn(0.0)\n")
    assert "drop (Stubborn) is still in training mode" in refused(tmp_path, text)


# --- what is said ---------------------------------------------------------------------------------------------

STATEMENTS = {
    "if input_ids.sum() > 5: input_ids = input_ids * 1": (
        "Could not guard on data-dependent expression", "a graph cannot branch on what tensors hold"),
    "for i in range(int(attention_mask.sum())): input_ids = input_ids + 0 * i": (
        "Could not extract specialized integer", "a graph cannot branch on what tensors hold"),
    "input_ids = input_ids + input_ids[input_ids > 3].sum() * 0": (
        "is traced to the operator NonZero", "write it with other operations"),
    "input_ids = input_ids.view(2, 5)": ("shape '[2, 5]' is invalid", "though not with batch_size 2, sequence_length 5"),
    "assert input_ids.shape[1] in (1, 5), 'five'": ("AssertionError: five", "with batch_size 1, sequence_length 4"),
    "input_ids = torch.stack([input_ids[:, t] for t in range(input_ids.shape[1])], 1)": (
        "the trace fixes sequence_length at 5", "Python loops over elements"),
    "input_ids = input_ids + torch.linalg.eigvalsh(torch.eye(3)).sum().long() * 0": (
        "_linalg_eigh has no ONNX form", "write it with other operations"),
    "input_ids = [input_ids][3]": ("IndexError: list index out of range", ""),
    "raise SystemExit(3)": ("SystemExit: 3", ""),
}  # fmt: skip


@pytest.mark.parametrize("statement", STATEMENTS)
def test_one_line_names_the_cause_and_the_users_line(statement: str, tmp_path: Path) -> None:
    line = refused(tmp_path, TOY.replace("        real =", f"        {statement}\n        real ="))
    for said in STATEMENTS[statement]:
        assert said in line, line
    assert f"model.py:15 `{statement}`"[:90] in line, line


def test_an_error_in_the_gate_names_the_case(tmp_path: Path) -> None:
    text = TOY.replace("nn.Embedding(11, 11)", "nn.Embedding(8, 11)")  # of 11 tokens
    line = refused(tmp_path, text)
    assert "IndexError: index out of range in self, at model.py:16 `sums = " in line
    assert "in the gate's case '" in line
    assert "', prefill" in line


def test_what_torch_suggests_is_passed_on() -> None:
    page = (
        "Could not guard on data-dependent expression Eq(u0, 5) (unhinted: Eq(u0, s50)).  (Size-like symbols: none)\n\n"
        "consider using data-dependent friendly APIs\n\nThe following call raised this error:\n"
        '  File "/home/me/model.py", line 17, in forward\n    y = attend(x)\n\n'
        "To fix the error, insert one of the following checks before this call:\n"
        "  1. torch._check(seen.shape[1] == 5)\n  2. torch._check(seen.shape[1] != 5)\n"
    )
    assert told(ValueError(f"\x1b[96m{page}\x1b[0m")) == (
        "ValueError: Could not guard on data-dependent expression Eq(u0, 5), at model.py:17 `y = attend(x)`; "
        "torch suggests torch._check(seen.shape[1] == 5) or torch._check(seen.shape[1] != 5)"
    )
