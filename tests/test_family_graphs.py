"""What holds for the whole family, on exported graphs: both targets, with the runtime and with onnxruntime alone.

Each preset is exported once. Graphs that keep a cache of fixed capacity take no pads (the runtime never gives
them any), so that what pads do is tested on all the others, and ragged batches on all.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
import pytest
import torch
from family_bundles import (
    FAMILY,
    TARGETS,
    Target,
    export_family,
    family_model,
    random_inputs,
    random_source,
    sequences,
)
from onnx.reference import ReferenceEvaluator
from torch import Tensor

import tfmx
from tfmx import InputError
from tfmx.export.fitting import can_stamp
from tfmx.runtime.bundle import Bundle
from tfmx.runtime.encoder import encode
from tfmx.runtime.engine import open_engine
from tfmx.tfm_model.config import LstmConfig

Array = np.ndarray
NAMES = list(FAMILY)
DECODERS = [name for name, config in FAMILY.items() if config.kind != "encoder"]
ENCODERS = [name for name in NAMES if name not in DECODERS]
PAIRS = [name for name in DECODERS if FAMILY[name].encoder is not None]
RECURRENT = [name for name in DECODERS if isinstance(FAMILY[name].mixer, LstmConfig)]
CONSTANT = RECURRENT + [n for n in DECODERS if n not in RECURRENT and FAMILY[n].mixer.random_features]
SETS = [
    name for name in ENCODERS
    if sequences(FAMILY[name]) and FAMILY[name].positions is None
    and not isinstance(FAMILY[name].mixer, LstmConfig) and FAMILY[name].mixer.relative is None
]  # fmt: skip
ORDERED = ["encoder", "embedding", "relative-encoder", "t5-bias-encoder", "random-features-encoder"]
MAPS = "encoder-decoder with maps"
T = 9


def far(name: str) -> float:
    """float32; the denominators of random features may come near 0."""
    return 2e-3 if "random" in name else 1e-4


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Target], Path]:
    @functools.cache
    def exported(name: str) -> dict[Target, Path]:
        shown = name == MAPS
        place = tmp_path_factory.mktemp("family")
        return export_family("encoder-decoder" if shown else name, place, attentions="all" if shown else ())

    return lambda name, target: exported(name)[target]


@functools.cache  # sessions are what takes time here
@pytest.mark.parametrize("name", [name for name in NAMES if not can_stamp(FAMILY[name])])
def test_what_is_traced_whole_is_the_same_graph_for_both_targets(folder, name: str) -> None:
    """No preset of these uses an op that ONNX Runtime has fused: the gate that one passes is the other's."""
    ort_folder, portable = (folder(name, target) for target in TARGETS)
    for file in portable.glob("*.onnx"):
        assert file.read_bytes() == (ort_folder / file.name).read_bytes(), file.name


def open_model(path: Path) -> tfmx.Model:
    return tfmx.load(path, threads=1)


def row(name: str, length: int = T, seed: int = 0) -> Array:
    return random_inputs(FAMILY[name], 1, length, seed, torch.float32)[0].numpy()


def source_of(name: str) -> Array:
    source = random_source(FAMILY[name], 1, torch.float32)
    assert source is not None
    return source[0].numpy()


def apply(model: tfmx.Model, name: str, given: Array) -> dict[str, Array]:
    """An encoder-decoder reads the start token 0 before its target."""
    if name not in PAIRS:
        return model.apply(given)
    return model.apply(source_of(name), target=[int(token) for token in given[1:]])


def sequence(name: str, length: int = T, seed: int = 0) -> Array:
    """What prefill reads: an encoder-decoder's begins with the start token."""
    given = row(name, length, seed)
    if name in PAIRS:
        given[0] = 0
    return given


def main(outputs: dict[str, Array], model: tfmx.Model) -> Array:
    return outputs[model.bundle.manifest.outputs.name]


def near(got: Array, wanted: Array, name: str) -> None:
    assert got.shape == wanted.shape
    assert np.abs(got - wanted).max(initial=0.0) < far(name) * max(1.0, np.abs(wanted).max(initial=0.0))


def one_row(name: str) -> bool:
    """Whether it gives one row of outputs for a whole sequence."""
    return FAMILY[name].head.pooling != "none"


# --- onnxruntime alone -----------------------------------------------------------------------------------


class Raw:
    """The graphs of a bundle, fed by hand."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.manifest = folder, Bundle.open(folder).manifest
        self.sessions: dict[str, ort.InferenceSession] = {}

    @property
    def takes_pads(self) -> bool:
        return all(state.growth != "capacity" for state in self.manifest.state)

    def feeds(
        self, role: str, given: Array, mask: Array, past: list[Array] = (), source_mask: Array | None = None
    ) -> dict[str, Array]:
        """`mask`: (B, P+T); a recurrent graph takes the new columns only."""
        graph, new = self.manifest.graphs[role], given.shape[1]
        ready = {
            "attention_mask": mask,
            "position_ids": (mask.cumsum(1) - 1).clip(0)[:, mask.shape[1] - new :],
            "num_logits_to_keep": np.asarray(0, np.int64),
            "encoder_attention_mask": source_mask,
            self.manifest.main_input(role): given,
        } | {state.past: value for state, value in zip(self.manifest.state, past, strict=False)}
        if graph.input("attention_mask") and graph.input("attention_mask").shape[1] in {"sequence_length", 1}:
            ready["attention_mask"] = mask[:, mask.shape[1] - new :]
        return {tensor.name: np.ascontiguousarray(ready[tensor.name]) for tensor in graph.inputs}

    def run(self, role: str, feeds: dict[str, Array]) -> dict[str, Array]:
        if role not in self.sessions:
            options = ort.SessionOptions()
            options.intra_op_num_threads = 1
            path = str(self.folder / f"{role}.onnx")
            self.sessions[role] = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        names = [tensor.name for tensor in self.manifest.graphs[role].outputs]
        return dict(zip(names, self.sessions[role].run(names, feeds), strict=True))

    def start(self, batch: int, fixed: dict[str, Array] | None = None) -> list[Array]:
        return [
            fixed[state.present]
            if state.growth == "fixed"
            else np.zeros(
                (batch, *(0 if isinstance(dim, str) else dim for dim in state.shape[1:])), np.float32
            )
            for state in self.manifest.state
        ]

    def next(self, past: list[Array], outputs: dict[str, Array]) -> list[Array]:
        return [outputs.get(state.present, old) for state, old in zip(self.manifest.state, past, strict=True)]


open_raw = functools.cache(Raw)


def begin(raw: Raw, name: str) -> tuple[list[Array], Array | None]:
    """The state before the first element of one sequence, and the source's mask."""
    if name not in PAIRS:
        return raw.start(1), None
    source = source_of(name)[None]
    mask = np.ones((1, source.shape[1]), np.int64)
    fixed = raw.run("encode", raw.feeds("encode", source, mask))
    return raw.start(1, fixed), mask


# --- the tests -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", NAMES)
def test_a_ragged_batch_gives_what_pytorch_gives_in_float64(folder, name: str, target: Target) -> None:
    reference, model = family_model(name), open_model(folder(name, target))
    rows = [sequence(name, length, seed) for seed, length in enumerate((T, 1, 4))]
    if name in PAIRS:
        sources = [source_of(name)] * 3
        found = model.apply_batch(sources, targets=[[int(i) for i in given[1:]] for given in rows])
    else:
        found = model.apply_batch(rows)
    for given, outputs in zip(rows, found, strict=True):
        inputs = torch.from_numpy(given)[None]
        inputs = inputs if inputs.dtype == torch.int64 else inputs.double()
        with torch.no_grad():
            source = random_source(FAMILY[name], 1)
            wanted = reference.apply_to(inputs, None, None if source is None else source.float().to(source))
        near(main(outputs, model), wanted.main[0].numpy(), name)
        for map_name, weights in wanted.maps.items():
            near(outputs[map_name], weights[0].numpy(), name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DECODERS)
def test_old_rows_stay_as_they_are_when_one_is_added(folder, name: str, target: Target) -> None:
    model, given = open_model(folder(name, target)), sequence(name)
    whole = main(apply(model, name, given), model)
    for n in (1, 5, T - 1):
        part = main(apply(model, name, given[:n]), model)
        if one_row(name):
            assert np.abs(part - whole).max() > far(name)
        else:
            near(part, whole[:n], name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DECODERS)
def test_prefill_of_all_is_prefill_of_some_and_decode_of_the_rest(folder, name: str, target: Target) -> None:
    """Two rows of different lengths, so that the runtime pads one, and the decode graph runs."""
    model = open_model(folder(name, target))
    graphs = model._open_graphs()
    rows, prefilled = [sequence(name, T), sequence(name, T - 3, seed=1)], (5, 2)
    encoded = None
    if name in PAIRS:
        encoded = encode(graphs, [source_of(name)] * 2, graphs.manifest.fixed_outputs)
    engine = open_engine(graphs, 2, T, encoded)
    found = engine.prefill([given[:n] for given, n in zip(rows, prefilled, strict=True)]).numpy().copy()
    for step in range(4):
        for index, (given, n) in enumerate(zip(rows, prefilled, strict=True)):
            wanted = main(apply(model, name, given[: n + step]), model)[-1]
            near(found[index], wanted, name)
        new = [given[n + step] for given, n in zip(rows, prefilled, strict=True)]
        found = engine.decode(np.stack(new)).numpy().copy()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [n for n in DECODERS if not one_row(n)])
def test_a_changed_element_changes_nothing_before_it(folder, name: str, target: Target) -> None:
    model, given = open_model(folder(name, target)), sequence(name)
    before = main(apply(model, name, given), model)
    for j in (1, 4, T - 1):
        changed = given.copy()
        changed[j] = (given[j] + 1) % 96 if given.dtype == np.int64 else given[j] + 1
        after = main(apply(model, name, changed), model)
        near(after[:j], before[:j], name)
        assert np.abs(after[j] - before[j]).max() > far(name)


PADDINGS = {
    "left": [0, 0, 0, 1, 1, 1, 1, 1],
    "right": [1, 1, 1, 1, 1, 0, 0, 0],
    "in between": [1, 0, 1, 1, 0, 0, 1, 1],
}


def padded(name: str, real: Array, mask: Array) -> Array:
    """One row's elements at the mask's ones, garbage elsewhere; an image is whole, always."""
    if not sequences(FAMILY[name]):
        return real[None]
    garbage = row(name, mask.shape[1], seed=5)[None].copy()
    garbage[:, mask[0] == 1] = real
    return garbage


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [n for n in ENCODERS if sequences(FAMILY[n])])
def test_padding_changes_nothing_of_an_encoder(folder, name: str, target: Target) -> None:
    raw, real = open_raw(folder(name, target)), row(name, 5)
    output = raw.manifest.outputs.name
    alone = raw.run("encode", raw.feeds("encode", real[None], np.ones((1, 5), np.int64)))[output]
    for bits in PADDINGS.values():
        mask = np.array([bits])
        found = raw.run("encode", raw.feeds("encode", padded(name, real, mask), mask))[output]
        near(found if one_row(name) else found[:, mask[0] == 1], alone, name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", DECODERS)
def test_padding_changes_nothing_of_a_decoder_nor_of_its_next_step(folder, name: str, target: Target) -> None:
    raw, real = open_raw(folder(name, target)), sequence(name, 6)
    if not raw.takes_pads:
        pytest.skip("a cache of fixed capacity: its rows are aligned by the runtime, without pads")
    past, source_mask = begin(raw, name)
    output, ones = raw.manifest.outputs.name, np.ones((1, 6), np.int64)
    alone = raw.run("prefill", raw.feeds("prefill", real[None], ones, past, source_mask))[output]
    for bits in PADDINGS.values():
        mask = np.array([bits])
        given = padded(name, real[:5], mask)
        first = raw.run("prefill", raw.feeds("prefill", given, mask, past, source_mask))
        if not one_row(name):
            near(first[output][:, mask[0] == 1], alone[:, :5], name)
        longer = np.concatenate((mask, [[1]]), axis=1)
        carried = raw.next(past, first)
        second = raw.run("decode", raw.feeds("decode", real[None, 5:], longer, carried, source_mask))
        near(second[output][:, -1], alone[:, -1], name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", [n for n in PAIRS if sequences(FAMILY[n].encoder)])
def test_padding_of_the_source_changes_nothing(folder, name: str, target: Target) -> None:
    raw, real = open_raw(folder(name, target)), source_of(name)[:5]
    given, found = sequence(name, 4)[None], []
    for bits in ([1] * 5, *PADDINGS.values()):
        mask = np.array([bits])
        source = np.full((1, len(bits)), 33)
        source[:, mask[0] == 1] = real
        fixed = raw.run("encode", raw.feeds("encode", source, mask))
        past = raw.start(1, fixed)
        feeds = raw.feeds("prefill", given, np.ones((1, 4), np.int64), past, mask)
        found.append(raw.run("prefill", feeds)[raw.manifest.outputs.name])
    for other in found[1:]:
        near(other, found[0], name)


ORDER = [3, 0, 8, 5, 1, 7, 2, 6, 4]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", SETS)
def test_a_set_without_positions_is_permutation_equivariant(folder, name: str, target: Target) -> None:
    model, given = open_model(folder(name, target)), row(name)
    plain, mixed = (main(model.apply(rows), model) for rows in (given, given[ORDER]))
    near(mixed, plain if one_row(name) else plain[ORDER], name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ORDERED)
def test_with_positions_it_is_not(folder, name: str, target: Target) -> None:
    model, given = open_model(folder(name, target)), row(name)
    plain, mixed = (main(model.apply(rows), model) for rows in (given, given[ORDER]))
    assert np.abs(mixed - (plain if one_row(name) else plain[ORDER])).max() > 5 * far(name)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", CONSTANT)
def test_the_state_has_the_same_size_at_every_length(folder, name: str, target: Target) -> None:
    raw = open_raw(folder(name, target))
    assert {state.growth for state in raw.manifest.state} == {"constant"}
    past = raw.start(1)
    sizes = [value.shape for value in past]
    for length in (1, 3, 100):
        given, mask = row(name, length)[None], np.ones((1, length), np.int64)
        first = raw.next(past, raw.run("prefill", raw.feeds("prefill", given, mask, past)))
        assert [value.shape for value in first] == sizes
        longer = np.ones((1, length + 1), np.int64)
        second = raw.run("decode", raw.feeds("decode", given[:, :1], longer, first))
        assert [value.shape for value in raw.next(first, second)] == sizes


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", PAIRS)
def test_cross_keys_and_values_are_made_by_encode_alone(folder, name: str, target: Target) -> None:
    names = {
        role: initializers(folder(name, target) / f"{role}.onnx") for role in ("encode", "prefill", "decode")
    }
    for layer in range(FAMILY[name].n_layers):
        for part in ("key", "value"):
            weight = f"blocks.{layer}.cross.{part}.weight"
            assert weight in names["encode"]
            assert weight not in names["prefill"] | names["decode"]
        assert f"blocks.{layer}.cross.query.weight" in names["decode"]
    raw = open_raw(folder(name, target))
    fixed = [state for state in raw.manifest.state if state.growth == "fixed"]
    assert len(fixed) == 2 * FAMILY[name].n_layers
    for role in ("prefill", "decode"):
        assert not {state.present for state in fixed} & {t.name for t in raw.manifest.graphs[role].outputs}


def initializers(path: Path) -> set[str]:
    return {tensor.name for tensor in onnx.load(path, load_external_data=False).graph.initializer}


@pytest.mark.parametrize("target", TARGETS)
def test_the_ablated_lstms_weights_reproduce_its_cells(folder, target: Target) -> None:
    name = "ablated-lstm"
    raw, model, given = open_raw(folder(name, target)), family_model(name), row(name, 20)[None]
    outputs = raw.run("prefill", raw.feeds("prefill", given, np.ones((1, 20), np.int64), raw.start(1)))
    x = model.embed.weight[torch.from_numpy(given[0])]
    for layer, block in enumerate(model.blocks):
        candidate, _, _ = block.attention.gates(x).chunk(3, dim=-1)
        weights = outputs[f"attentions.{layer}"][0]  # (N, T, T)
        cells = np.einsum("nts,sn->tn", weights, candidate.sigmoid().numpy())
        assert np.abs(cells[-1] - outputs[f"present_recurrent.{layer}.cell"][0]).max() < 1e-5
        x = Tensor.sigmoid(torch.from_numpy(cells)).double()
    assert (outputs["attentions.0"] >= 0).all()


@pytest.mark.parametrize("target", TARGETS)
def test_attention_weights_sum_to_one(folder, target: Target) -> None:
    for name in ("attention-maps", MAPS):
        plain = "encoder-decoder" if name == MAPS else name
        model = open_model(folder(name, target))
        outputs = apply(model, plain, sequence(plain))
        maps = {key: value for key, value in outputs.items() if "attentions" in key}
        sides = 2 * FAMILY[plain].n_layers + 3 if name == MAPS else FAMILY[plain].n_layers
        assert len(maps) == sides
        for key, weights in maps.items():
            assert np.abs(weights.sum(-1) - 1).max() < 1e-5, key
            assert (weights >= 0).all(), key
            if key.startswith("attentions"):
                assert (np.triu(weights, 1) == 0).all(), key


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["learned", "one-hot", "lstm", "encoder", "regression", "encoder-decoder"])
def test_a_sequence_past_the_context_is_one_clear_line(folder, name: str, target: Target) -> None:
    name = "pre-norm" if name == "learned" else name
    model = open_model(folder(name, target))
    context = FAMILY[name].context
    with pytest.raises(InputError) as caught:
        apply(model, name, sequence(name, context + 1))
    assert str(context) in str(caught.value)
    assert "\n" not in str(caught.value)


# --- standard operators only -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_portable_graphs_have_standard_operators_only(folder, name: str) -> None:
    for path in folder(name, "portable").glob("*.onnx"):
        model = onnx.load(path, load_external_data=False)
        assert {opset.domain for opset in model.opset_import} == {""}, path.name
        assert {node.domain for node in every_node(model.graph)} == {""}, path.name
        assert not model.functions


def every_node(graph: onnx.GraphProto):
    for node in graph.node:
        yield node
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield from every_node(attribute.g)


def evaluated(raw: Raw, role: str, feeds: dict[str, Array]) -> dict[str, Array]:
    names = [tensor.name for tensor in raw.manifest.graphs[role].outputs]
    evaluator = ReferenceEvaluator(str(raw.folder / f"{role}.onnx"))
    return dict(zip(names, evaluator.run(names, feeds), strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_the_standards_own_evaluator_gives_what_onnxruntime_gives(folder, name: str) -> None:
    raw = open_raw(folder(name, "portable"))
    mixer, bits = FAMILY[name].mixer, PADDINGS["in between"]
    if isinstance(mixer, LstmConfig) and not mixer.ablated:
        if (mixer.candidate, mixer.output) != ("tanh", "tanh"):
            pytest.skip(
                "onnx.reference's LSTM has tanh written in, whatever the attribute `activations` says"
            )
        bits = [1] * 8  # and it does not read sequence_lens
    mask, past, source_mask = np.array(bits)[None], [], None
    if name in ENCODERS or name in PAIRS:
        given = source_of(name)[None] if name in PAIRS else padded(name, row(name, sum(bits)), mask)
        source_mask = mask[:, : given.shape[1]]
        feeds = raw.feeds("encode", given, source_mask)
        fixed = same_twice(raw, "encode", feeds, name)
    if name in DECODERS:
        past = raw.start(1, fixed if name in PAIRS else None)
        given = padded(name, sequence(name, sum(bits)), mask)
        first = same_twice(raw, "prefill", raw.feeds("prefill", given, mask, past, source_mask), name)
        longer = np.concatenate((mask, [[1]]), axis=1)
        feeds = raw.feeds("decode", given[:, :1], longer, raw.next(past, first), source_mask)
        same_twice(raw, "decode", feeds, name)


def same_twice(raw: Raw, role: str, feeds: dict[str, Array], name: str) -> dict[str, Array]:
    wanted, found = raw.run(role, feeds), evaluated(raw, role, feeds)
    for key, value in wanted.items():
        near(found[key], value, name)
    return wanted
