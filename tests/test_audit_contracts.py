"""The table of contracts and what the exporter emits are held to each other: neither can change alone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import onnx
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
from tfmx.runtime.graph_audit import audit_graph
from tfmx.runtime.ops import OPSETS

ALL = list(OPSETS[""])
FEW = [17, 18, 24]  # attributes became inputs at 18; later opsets changed nothing that we emit
SEEN: set[tuple[str, int]] = set()  # operators, with the place of their contract


def check(graphs: Iterable[Emitted]) -> None:
    """Each passes, and what it uses is noted."""
    count = 0
    for graph in graphs:
        try:
            audit_graph(graph.data, graph.info, graph.weights_size, graph.longest)
        except Exception as error:
            raise AssertionError(graph.name) from error
        found = read_graph(graph.data)
        for node in found.nodes:
            contract = contract_of(node.op, found.opsets[""])
            assert contract is not None
            SEEN.add((node.op, CONTRACTS[node.op].index(contract)))
        count += 1
    assert count


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", list(FAMILY))
def test_every_graph_of_the_family_passes(name: str, precision: str) -> None:
    check(of_family(name, precision, ALL if precision == "fp32" else FEW))


@pytest.mark.parametrize("name", list(FAMILY))
def test_graphs_that_show_their_attention_pass(name: str) -> None:
    check(of_family(name, "fp32", FEW, attentions="all"))


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", list(VARIANTS))
def test_every_variant_passes(name: str, precision: str) -> None:
    check(of_variant(name, precision, ALL if name == "windows" else FEW))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_every_form_of_blocks_passes_with_both_caches(precision: str) -> None:
    for opset in FEW:
        check(quantised(precision, opset))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_module_of_ones_own_passes(precision: str) -> None:
    check(
        own_modules(
            precision, [opset for opset in ALL if opset >= TRACE_OPSET][:: 6 if precision == "fp16" else 1]
        )
    )


def test_every_contract_is_used_by_a_graph_or_says_who_needs_it() -> None:
    """Runs behind the others: it looks at what they saw."""
    if not SEEN:
        pytest.skip("it looks at what the tests above saw: run the whole file")
    for op, contracts in CONTRACTS.items():
        for place, contract in enumerate(contracts):
            used = (op, place) in SEEN
            if not used:
                assert contract.why, f"{op} is used by no graph and has no reason"


def test_a_reason_stands_only_where_no_graph_of_the_family_has_the_operator() -> None:
    pass
