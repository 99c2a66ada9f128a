"""Which matrices are quantised, and how: what `--quant` and its companions ask for."""

from __future__ import annotations

import fnmatch
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal, NoReturn, get_args

from .. import InputError
from ..tfm_model.blocks import Bits, BlockFormat, BlockSize, LazyBlocks
from .arithmetic import Activations
from .fitting import requantise_error
from .layout import BlockLayout

Rounding = Literal["nearest", "search", "smooth"]
DOWN = "mlp.down.weight"
# What mixed recipes keep at 8 bits, beside `DOWN`, the first and the last layer; of an encoder too.
ENDS = ("embed.weight", "embed.project.weight", "head.weight")
# Whose inputs lose most when they are rounded to int8, for what a second step costs (SmolLM2, ARCHITECTURE.md).
FINE = (DOWN,)  # and the head
FINE_WHERE_KEPT = (*FINE, "attention.qkv.weight")  # no channel can be evened out there
FLOAT = "float"  # the form of a matrix that is not quantised


@dataclass(frozen=True, kw_only=True, slots=True)
class Quant:
    bits: Bits
    block: BlockSize = 32
    zero_points: bool | None = (
        False  # an integer zero point a block; else symmetric. None: just if all have 8 bits
    )
    rounding: Rounding = (
        "smooth"  # as search, after channels were evened out where that can be (smoothing.py)
    )
    # Embedding, head, first and last layer, and the projections out of the MLPs at 8 bits; None: if others are left for 4.
    mixed: bool | None = False
    skip: tuple[str, ...] = ()  # patterns of names that stay as they are
    again: bool = False  # blocks that the checkpoint has already are rounded once more
    calibrate: Path | None = None  # a text whose activations decide the rounding (GPTQ)
    # mixed: int8, in two steps where most would be lost and weights are good enough for that to be seen
    activations: Activations | Literal["mixed"] = "mixed"

    def layouts(self, matrices: Mapping[str, Matrix]) -> dict[str, BlockLayout]:
        """How each matrix that is quantised lies in the file."""
        self._check_patterns(matrices)
        self._check_blocks(matrices)
        found, unfit, wide = {}, set(), self._wide(matrices)
        if not matrices:
            raise InputError(
                "--quant finds nothing to quantise: no nn.Linear or F.linear with a parameter of the module; leave it out"
            )
        if self.mixed and not wide:
            raise InputError(
                "--quant-mixed goes by the names of built-in models (blocks.0..., head.weight), and this module has none "
                "of them; leave it out, or name what to leave as it is with --quant-skip"
            )
        for name, matrix in matrices.items():
            if is_left_out(name, self.skip):
                continue
            if self.keeps(matrix.blocks):
                assert matrix.blocks is not None
                found[name] = replace(_centred(matrix.blocks), fine=self._is_fine(name, matrices))
                continue
            block = self._fitting(matrix.shape[1])
            if block is None:
                unfit.add(name)
                continue
            format_ = BlockFormat(
                bits=8 if name in wide else self.bits, block=block, zero_points=self._has_zero_points
            )
            found[name] = BlockLayout(format_, fine=self._is_fine(name, matrices))
        if not found:
            self._refuse_nothing({matrices[name].shape[1] for name in unfit})
        if not self.rounds(matrices, found):
            self._check_nothing_asked(found.values())
        elif self.mixed and all(layout.format.bits == 8 for layout in found.values()):
            raise InputError(
                "--quant-mixed leaves no matrix at int4: all are in the first or the last layer, at the ends, or "
                "lead out of an MLP; use --quant int8 or --quant-uniform"
            )
        return found

    @property
    def _has_zero_points(self) -> bool:
        return self.bits == 8 if self.zero_points is None else self.zero_points

    @property
    def smooths(self) -> bool:
        return self.rounding == "smooth" or self.calibrate is not None

    def rounds(self, matrices: Mapping[str, Matrix], found: Iterable[str]) -> bool:
        """Whether any of the matrices that are quantised is not just taken over."""
        return not all(self.keeps(matrices[name].blocks) for name in found)

    def keeps(self, blocks: LazyBlocks | None) -> bool:
        """Whether a checkpoint's own blocks are taken over as they are."""
        return blocks is not None and not self.again

    def _is_fine(self, name: str, matrices: Mapping[str, Matrix]) -> bool:
        is_kept = self.keeps(matrices[name].blocks)
        loses_more = self.bits == 4 and not is_kept  # by its weights, a hundred times as much
        if self.activations != "mixed" or loses_more:
            return False
        head = "head.weight" if "head.weight" in matrices else "embed.weight"
        return name == head or name.endswith(FINE_WHERE_KEPT if is_kept else FINE)

    def _wide(self, matrices: Mapping[str, Matrix]) -> frozenset[str]:
        """What has 8 bits, where others have 4."""
        if self.mixed is False or self.bits == 8:
            return frozenset()
        wide = self._outer(matrices)
        rounded = {
            name
            for name, matrix in matrices.items()
            if not is_left_out(name, self.skip) and not self.keeps(matrix.blocks)
        }
        return frozenset() if self.mixed is None and rounded <= wide else wide

    def _outer(self, matrices: Iterable[str]) -> frozenset[str]:
        wide = set()
        for part in ("", "encoder."):
            inner = {name.removeprefix(part): name for name in matrices if name.startswith(part)}
            layers = sorted({int(name.split(".")[1]) for name in inner if name.startswith("blocks.")})
            outer = tuple(f"blocks.{layer}." for layer in (*layers[:1], *layers[-1:]))
            wide |= {
                whole
                for name, whole in inner.items()
                if name in ENDS or name.startswith(outer) or name.endswith(DOWN)
            }
        return frozenset(wide)

    def _check_blocks(self, matrices: Mapping[str, Matrix]) -> None:
        """What the checkpoint has in blocks is rounded again only by those who ask for it."""
        sizes = {matrix.blocks.format.block for matrix in matrices.values() if matrix.blocks is not None}
        if self.again and not sizes:
            raise requantise_error()
        if not self.again and sizes - {self.block}:
            raise InputError(
                f"the checkpoint has blocks of {max(sizes)} weights, --quant-block is {self.block}; add --requantise to round "
                "them again, or leave --quant-block out"
            )

    def _fitting(self, row: int) -> BlockSize | None:
        """The largest block, of that asked for and smaller ones, that divides a row; None: the matrix stays float."""
        sizes = [size for size in get_args(BlockSize) if size <= self.block and row % size == 0]
        return max(sizes, default=None)

    def _refuse_nothing(self, rows: set[int]) -> NoReturn:
        if not rows:
            raise InputError("--quant-skip leaves no matrix to quantise; leave --quant out instead")
        least = min(get_args(BlockSize))
        raise InputError(
            f"rows of {' and '.join(map(str, sorted(rows)))} weights do not even fall into blocks of {least}, so that "
            "no matrix can be quantised; leave --quant out"
        )

    def _check_nothing_asked(self, kept: Iterable[BlockLayout]) -> None:
        bits = statistics.mode(layout.format.bits for layout in kept)
        if self.bits != bits:
            raise InputError(
                f"--quant is int{self.bits}, the checkpoint's blocks are int{bits} and taken over exactly; use --quant int{bits}, "
                "or add --requantise"
            )
        asked = {
            "--calibrate": self.calibrate is not None,
            "--quant-mixed": self.mixed,
            "--quant-zero-points": self.zero_points,
            f"--quant-round {self.rounding}": self.rounding != "smooth",  # the default
        }
        for option, given in asked.items():
            if given:
                raise InputError(
                    f"{option} has nothing to round: the checkpoint's blocks are taken over exactly; add --requantise"
                )

    def _check_patterns(self, matrices: Mapping[str, Matrix]) -> None:
        for pattern in self.skip:
            if not fnmatch.filter(matrices, pattern):
                known = ", ".join(dict.fromkeys(general_name(name) for name in matrices))
                raise InputError(f"--quant-skip {pattern!r} matches no matrix; there are {known}")


@dataclass(frozen=True, slots=True)
class Matrix:
    shape: tuple[int, ...]  # (out, in)
    blocks: LazyBlocks | None = None  # what the checkpoint has, if that is blocks


def is_left_out(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def describe(layout: BlockLayout) -> str:
    """For the manifest: int4-32, int8-32-zeros, int4-32-shifts, int8-32-fine."""
    format_ = layout.format
    has = {"zeros": format_.zero_points, "shifts": layout.shifted, "fine": layout.fine}
    ends = [word for word, is_so in has.items() if is_so]
    return "-".join([f"int{format_.bits}", str(format_.block), *ends])


def parse_layout(text: str) -> BlockLayout:
    kind, block, *ends = text.split("-")
    return BlockLayout(
        BlockFormat(bits=int(kind[3:]), block=int(block), zero_points="zeros" in ends),  # type: ignore[arg-type]
        shifted="shifts" in ends,
        fine="fine" in ends,
    )


def stored_layouts(forms: Mapping[str, str]) -> dict[str, BlockLayout]:
    """Of a manifest's `quant.matrices`, those that are quantised."""
    return {name: parse_layout(form) for name, form in forms.items() if form != FLOAT}


def _centred(blocks: LazyBlocks) -> BlockLayout:
    """See `layout.as_stored`: what has shifts needs no zero points."""
    zero_points = blocks.format.zero_points and not blocks.shifted
    return BlockLayout(
        BlockFormat(bits=blocks.format.bits, block=blocks.format.block, zero_points=zero_points),
        blocks.shifted,
    )


def general_name(name: str) -> str:
    """blocks.3.mlp.up.weight → blocks.*.mlp.up.weight."""
    return re.sub(r"(^|\.)blocks\.\d+\.", r"\1blocks.*.", name)
