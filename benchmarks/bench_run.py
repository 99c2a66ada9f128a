"""Speed and memory of SmolLM2-135M in float32: both targets of tfmx beside PyTorch (transformers).

    python benchmarks/bench_run.py

Same weights, batch 1, greedy. Every measurement is a process of its own; rounds are interleaved, and medians shown.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import smollm2

PROMPT_TOKENS, NEW_TOKENS, ROUNDS = 512, 64, 3
PROMPT = [(i * 7919) % 49000 + 17 for i in range(PROMPT_TOKENS)]


def measure_tfmx(bundle: str) -> dict[str, float]:
    started = time.perf_counter()
    import tfmx

    model = tfmx.load(bundle)
    loaded = time.perf_counter()
    list(model.generate(PROMPT[:32], max_new_tokens=4))  # warm
    *_, last = model.generate(PROMPT, max_new_tokens=NEW_TOKENS)
    stats = last.statistics
    return {
        "load": loaded - started,
        "prefill": stats.prefill_tokens_per_second,
        "decode": stats.decode_tokens_per_second,
    }


def measure_transformers(gguf: str) -> dict[str, float]:
    started = time.perf_counter()
    import torch
    from transformers import AutoModelForCausalLM

    folder = smollm2.CACHE / "transformers"
    if not folder.exists():  # dequantised once: reading GGUF is not what is measured
        path = Path(gguf)
        read = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        plain = AutoModelForCausalLM.from_config(read.config)  # what was read calls itself quantised
        plain.load_state_dict(read.state_dict())
        del plain.config.quantization_config
        plain.save_pretrained(folder)
        return measure_transformers(gguf)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    loaded = time.perf_counter()
    with torch.no_grad():
        model(torch.tensor([PROMPT[:32]]))  # warm
        begin = time.perf_counter()
        out = model(torch.tensor([PROMPT]), use_cache=True, logits_to_keep=1)
        token, cache = out.logits[0, -1].argmax(), out.past_key_values
        prefilled = time.perf_counter()
        for _ in range(NEW_TOKENS - 1):
            out = model(token.view(1, 1), past_key_values=cache, use_cache=True)
            token, cache = out.logits[0, -1].argmax(), out.past_key_values
        end = time.perf_counter()
    return {
        "load": loaded - started,
        "prefill": PROMPT_TOKENS / (prefilled - begin),
        "decode": (NEW_TOKENS - 1) / (end - prefilled),
    }


def main() -> None:
    if len(sys.argv) > 1:
        kind, path = sys.argv[1:]
        result = measure_transformers(path) if kind == "transformers" else measure_tfmx(path)
        print(json.dumps({**result, "memory": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3}))
        return
    candidates = {"PyTorch (transformers)": ("transformers", smollm2.fetched())}
    for target in ("ort", "portable"):
        candidates[f"tfmx, {target}"] = ("tfmx", str(smollm2.bundle(target, "--target", target)))
    results: dict[str, list[dict[str, float]]] = {name: [] for name in candidates}
    for _ in range(ROUNDS):
        for name, arguments in candidates.items():
            done = subprocess.run(
                [sys.executable, __file__, *arguments], check=True, capture_output=True, text=True
            )
            results[name].append(json.loads(done.stdout.splitlines()[-1]))
    print(
        f"| SmolLM2-135M, fp32 | prefill {PROMPT_TOKENS} (tokens/s) | decode at {PROMPT_TOKENS} (tokens/s) | load (s) | peak memory (MB) |"
    )
    print("|---|---|---|---|---|")
    for name, rows in results.items():
        middle = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
        print(
            f"| {name} | {middle['prefill']:.0f} | {middle['decode']:.1f} | {middle['load']:.1f} | {middle['memory']:.0f} |"
        )


if __name__ == "__main__":
    main()
