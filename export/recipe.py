"""Which matrices are quantised, and how: what `--quant` and its companions ask for."""

from __future__ import annotations

import fnmatch
import re
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from .. import InputError
from ..tfm_model.blocks import Bits, BlockFormat, BlockSize, LazyBlocks
from .arithmetic import Activations
from .fitting import requantise_error
from .layout import BlockLayout

Rounding = Literal["nearest", "search", "smooth"]
# What mixed recipes keep at 8 bits, beside the first and the last layer; of an encoder too.
ENDS = ("embed.weight", "embed.project.weight", "head.weight")


@dataclass(frozen=True, kw_only=True, slots=True)
class Quant:
    bits: Bits
    block: BlockSize = 32
    zero_points: bool = False  # an integer zero point a block; else symmetric
    rounding: Rounding = (
        "smooth"  # as search, after channels were evened out where that can be (smoothing.py)
    )
    mixed: bool = False  # embedding, head, first and last layer at 8 bits
    skip: tuple[str, ...] = ()  # patterns of names that stay as they are
    again: bool = False  # blocks that the checkpoint has already are rounded once more
    calibrate: Path | None = None  # a text whose activations decide the rounding (GPTQ)
    activations: Activations = "int8"

    def layouts(self, matrices: Mapping[str, Matrix]) -> dict[str, BlockLayout]:
        """How each matrix that is quantised lies in the file."""
        self._check_patterns(matrices)
        self._check_blocks(matrices)
        wide = self._wide(matrices) if self.mixed else frozenset()
        if not matrices:
            raise InputError(
                "--quant finds nothing to quantise: no nn.Linear or F.linear with a parameter of the module; leave it out"
            )
        if self.mixed and not wide:
            raise InputError(
                "--quant-mixed goes by the names of built-in models (blocks.0..., head.weight), and this module has none "
                "of them; leave it out, or name what to leave as it is with --quant-skip"
            )
        found = {}
        for name, matrix in matrices.items():
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in self.skip):
                continue
            if self.keeps(matrix.blocks):
                assert matrix.blocks is not None
                found[name] = _centred(matrix.blocks)
                continue
            format_ = BlockFormat(
                bits=8 if name in wide else self.bits, block=self.block, zero_points=self.zero_points
            )
            found[name] = BlockLayout(format_)
        if not found:
            raise InputError("--quant-skip leaves no matrix to quantise; leave --quant out instead")
        self._check_rows(
            {name: matrices[name].shape for name in found if not self.keeps(matrices[name].blocks)}
        )
        if not self.rounds(matrices, found):
            self._check_nothing_asked(found.values())
        elif self.mixed and all(layout.format.bits == 8 for layout in found.values()):
            raise InputError(
                "--quant-mixed leaves no matrix at int4: all are in the first or the last layer, or at the ends; "
                "use --quant int8, or leave --quant-mixed out"
            )
        return found

    @property
    def smooths(self) -> bool:
        return self.rounding == "smooth" or self.calibrate is not None

    def rounds(self, matrices: Mapping[str, Matrix], found: Iterable[str]) -> bool:
        """Whether any of the matrices that are quantised is not just taken over."""
        return not all(self.keeps(matrices[name].blocks) for name in found)

    def keeps(self, blocks: LazyBlocks | None) -> bool:
        """Whether a checkpoint's own blocks are taken over as they are."""
        return blocks is not None and not self.again

    def _wide(self, matrices: Iterable[str]) -> frozenset[str]:
        wide = set()
        for part in ("", "encoder."):
            inner = {name.removeprefix(part): name for name in matrices if name.startswith(part)}
            layers = sorted({int(name.split(".")[1]) for name in inner if name.startswith("blocks.")})
            outer = tuple(f"blocks.{layer}." for layer in (*layers[:1], *layers[-1:]))
            wide |= {whole for name, whole in inner.items() if name in ENDS or name.startswith(outer)}
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

    def _check_rows(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        """All that do not fall into whole blocks are told at once, with what to do."""

        def unfit(block: int) -> list[str]:
            return list(dict.fromkeys(_general(name) for name, shape in shapes.items() if shape[1] % block))

        names = unfit(self.block)
        if not names:
            return
        fitting = [str(size) for size in get_args(BlockSize) if not unfit(size)]
        least = min(get_args(BlockSize), key=lambda size: len(unfit(size)))  # the smallest, of equals
        use = f"--quant-block {' or '.join(fitting) or least}"
        skips = "".join(f" --quant-skip '{name}'" for name in unfit(least))
        rows = sorted({shape[1] for shape in shapes.values() if shape[1] % self.block})
        raise InputError(
            f"rows of {' and '.join(map(str, rows))} weights are no multiple of --quant-block {self.block} "
            f"({names[0]}{f' and {len(names) - 1} more' if names[1:] else ''}); use {use}{skips}"
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
                known = ", ".join(dict.fromkeys(_general(name) for name in matrices))
                raise InputError(f"--quant-skip {pattern!r} matches no matrix; there are {known}")


@dataclass(frozen=True, slots=True)
class Matrix:
    shape: tuple[int, ...]  # (out, in)
    blocks: LazyBlocks | None = None  # what the checkpoint has, if that is blocks


def describe(layout: BlockLayout) -> str:
    """For the manifest: int4-32, int8-32-zeros, int4-32-shifts."""
    format_ = layout.format
    ends = [word for word, has in (("zeros", format_.zero_points), ("shifts", layout.shifted)) if has]
    return "-".join([f"int{format_.bits}", str(format_.block), *ends])


def parse_layout(text: str) -> BlockLayout:
    kind, block, *ends = text.split("-")
    return BlockLayout(
        BlockFormat(bits=int(kind[3:]), block=int(block), zero_points="zeros" in ends),  # type: ignore[arg-type]
        shifted="shifts" in ends,
    )


def _centred(blocks: LazyBlocks) -> BlockLayout:
    """See `layout.as_stored`: what has shifts needs no zero points."""
    zero_points = blocks.format.zero_points and not blocks.shifted
    return BlockLayout(
        BlockFormat(bits=blocks.format.bits, block=blocks.format.block, zero_points=zero_points),
        blocks.shifted,
    )


def _general(name: str) -> str:
    """blocks.3.mlp.up.weight → blocks.*.mlp.up.weight."""
    return re.sub(r"(^|\.)blocks\.\d+\.", r"\1blocks.*.", name)
