"""The table of contracts and what the exporter emits are held to each other: neither can change alone."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from emitted_graphs import (
    PRECISIONS,
    Emitted,
    of_family,
    of_variant,
    own_modules,
    quantised,
)
from family_bundles import FAMILY
from random_models import VARIANTS

from tfmx.export.options import Precision
from tfmx.export.trace import TRACE_OPSET
from tfmx.runtime.audit.contracts import CONTRACTS, contract_of
from tfmx.runtime.audit.dims import (
    add,
    exact_quotient,
    floor_quotient,
    is_at_least,
    maximum,
    minimum,
    multiply,
    subtract,
    symbol,
)
from tfmx.runtime.audit.reading import read_graph
from tfmx.runtime.bundle import BundleError
from tfmx.runtime.graph_audit import audit_graph
from tfmx.runtime.ops import OPSETS
from tfmx.tfm_model.config import AttentionConfig, ModelConfig

ALL = list(OPSETS[""])
FEW = [17, 18, 24]  # attributes became inputs at 18; later opsets changed nothing that we emit
SEEN: set[tuple[str, int]] = set()  # operators, with the place of their contract
DONE: list[str] = []  # the tests that have noted what they saw


def check(graphs: Iterable[Emitted]) -> None:
    """Each passes, and what it uses is noted."""
    count = 0
    for graph in graphs:
        try:
            audit_graph(graph.data, graph.info, graph.weights_size, graph.longest)
        except BundleError as error:
            raise AssertionError(graph.name) from error
        found = read_graph(graph.data)
        for node in found.nodes:
            contract = contract_of(node.op, found.opsets[""])
            assert contract is not None
            SEEN.add((node.op, CONTRACTS[node.op].index(contract)))
        count += 1
    assert count


def has_attention_to_show(config: ModelConfig) -> bool:
    return isinstance(config.mixer, AttentionConfig) and config.mixer.random_features is None


@pytest.mark.parametrize("name", list(FAMILY))
def test_every_graph_of_the_family_passes_at_every_opset(name: str) -> None:
    check(of_family(name, "fp32", ALL))
    DONE.append(name)


@pytest.mark.slow
@pytest.mark.parametrize("name", list(FAMILY))
def test_every_graph_of_the_family_passes_in_half_precision(name: str) -> None:
    check(of_family(name, "fp16", FEW))


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, config in FAMILY.items() if has_attention_to_show(config)])
def test_graphs_that_show_their_attention_pass(name: str) -> None:
    check(of_family(name, "fp32", FEW, attentions="all"))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_variant_passes(name: str, precision: Precision) -> None:
    check(of_variant(name, precision, ALL if name == "windows" else FEW))
    DONE.append(name)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_form_of_blocks_passes_with_both_caches(precision: Precision) -> None:
    check(quantised(precision))
    DONE.append(precision)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_module_of_ones_own_passes(precision: Precision) -> None:
    check(own_modules(precision, [TRACE_OPSET, ALL[-1]]))


def test_every_contract_is_used_by_a_graph_of_the_family_or_says_who_else_needs_it() -> None:
    if len(DONE) < len(FAMILY) + 2 * len(VARIANTS) + len(PRECISIONS):
        pytest.skip("it looks at what the tests above saw: run the whole file")
    unused = {(op, place) for op, found in CONTRACTS.items() for place in range(len(found))} - SEEN
    for op, place in sorted(unused):
        assert CONTRACTS[op][place].why, f"{op}: no graph has it, and there is no reason why it is there"


B, T, P = symbol("B", 1), symbol("T", 1, 64), symbol("P", 0)


def test_sizes_are_compared_as_far_as_they_are_known() -> None:
    total = add(P, T)
    assert total == add(T, P)
    assert subtract(total, T) == P
    assert subtract(total, total) == 0
    assert exact_quotient(multiply(multiply(B, T), 12), multiply(T, 4)) == multiply(B, 3)
    assert exact_quotient(multiply(B, 7), 4) is None
    assert exact_quotient(total, T) is None
    assert is_at_least(total, T)
    assert is_at_least(T, 1)
    assert is_at_least(64, T)
    assert not is_at_least(P, 1)
    assert not is_at_least(63, T)
    assert not is_at_least(T, B)
    assert add(None, T) is None
    assert multiply(None, 0) == 0


def test_minima_and_quotients_keep_their_bounds() -> None:
    least = minimum(T, 4)
    assert is_at_least(T, least)
    assert is_at_least(4, least)
    assert is_at_least(least, 1)
    assert add(least, subtract(T, least)) == T
    assert minimum(T, 64) == T
    assert is_at_least(maximum(T, 4), T)
    spans = floor_quotient(add(T, 63), 64)
    assert is_at_least(multiply(spans, 64), T)
    assert is_at_least(add(T, 63), multiply(spans, 64))
    assert not is_at_least(T, multiply(spans, 64))
    assert floor_quotient(multiply(B, 64), 64) == B
