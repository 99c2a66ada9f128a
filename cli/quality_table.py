"""The figures of `--quality` as a table: what a bundle's certificate says."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .console import plural, write_line, write_table

# name in the certificate: what it is, and how it is written
_ROWS = {
    "kl_mean": ("KL divergence, mean", ".3g"),
    "kl_99": ("KL divergence, 99 %", ".3g"),
    "top_1": ("top-1 agreement", ".2%"),
    "perplexity_source": ("perplexity, source", ".3f"),
    "perplexity_bundle": ("perplexity, bundle", ".3f"),
    "perplexity_ratio": ("perplexity, bundle / source", ".4f"),
    "kl_prefill": ("KL of one window, prefill", ".3g"),
    "kl_decode": ("KL of one window, decoded", ".3g"),
    "kl_decode_minus_prefill": ("decoded minus prefill", "+.2g"),
}


def write_quality(found: Mapping[str, Any]) -> None:
    """`found`: the manifest's `quality`."""
    text = str(found.get("text_sha256"))
    windows, window = found.get("windows", 0), found.get("window")
    write_line(
        f"{found.get('runtime')} against {found.get('reference')}: {plural(found.get('tokens', 0), 'token')} in "
        f"{plural(windows, 'window')} of {window}, text sha256 {text[:16]}…"
    )
    rows = [("", "", "±")]
    rows += [
        (
            title,
            format(found[name]["value"], form),
            format(found[name]["error"], form if form.endswith("%") else ".2g"),
        )
        for name, (title, form) in _ROWS.items()
        if name in found
    ]
    write_table(rows, align="<>>")
