"""Quantises a GGUF file as `llama-quantize` does: the same library call, run by llama.cpp's environment.

python llama_quantize.py IN.gguf OUT.gguf Q4_0|Q8_0 [--pure]
"""

from __future__ import annotations

import sys

from llama_binding import load_binding


def main() -> None:
    source, target, kind, *flags = sys.argv[1:]
    binding = load_binding()
    params = binding.llama_model_quantize_default_params()
    params.ftype = getattr(binding, f"LLAMA_FTYPE_MOSTLY_{kind}")
    params.pure = "--pure" in flags
    found = binding.llama_model_quantize(source.encode(), target.encode(), params)
    if found != 0:
        sys.exit(f"llama_model_quantize gave {found}, wanted 0")


if __name__ == "__main__":
    main()
