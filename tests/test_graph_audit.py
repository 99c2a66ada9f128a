"""The audit lets through what the exporter writes, and nothing else ever reaches onnxruntime."""

from __future__ import annotations

import random

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tiny_bundle import CONTEXT, tiny_model, tiny_weights

from tfmx.runtime.audit.contract import Call, ContractError, Value, check_inputs
from tfmx.runtime.audit.contracts import OPS, contract_of
from tfmx.runtime.audit.rules_elementwise import added
from tfmx.runtime.bundle import BundleError, GraphInfo, TensorInfo
from tfmx.runtime.graph_audit import audit_graph
from tfmx.runtime.wire import WireError, read_message

WEIGHTS = tiny_weights()
OFFSETS = dict(zip(WEIGHTS, np.cumsum([0, *(a.nbytes for a in WEIGHTS.values())]).tolist(), strict=False))
SIZE = sum(array.nbytes for array in WEIGHTS.values())


def make(flavour="capacity", role="decode"):
    model, inputs, outputs = tiny_model(flavour, role, WEIGHTS, OFFSETS)
    return model, GraphInfo(file=f"{role}.onnx", inputs=tuple(inputs), outputs=tuple(outputs))


def audit(model, info, size=SIZE):
    return audit_graph(model.SerializeToString(), info, size, CONTEXT)


@pytest.mark.parametrize("flavour", ["append", "capacity"])
@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_our_own_graphs_pass_and_are_counted(flavour, role):
    model, info = make(flavour, role)
    summary = audit(model, info)
    assert sum(summary.ops.values()) == len(model.graph.node)
    assert summary.opsets == {"": 18, "com.microsoft": 1}
    names = {tensor.name for tensor in model.graph.initializer}
    assert summary.initializer_bytes >= sum(WEIGHTS[name].nbytes for name in names & WEIGHTS.keys())
    matrices = [name for name in names if name.split(".")[-1] in {"qkv", "out", "gate", "up", "down", "head"}]
    assert summary.packable_bytes == sum(WEIGHTS[name].nbytes for name in matrices)


def other_op(model):
    model.graph.node[0].op_type = "DepthToSpace"


def other_domain(model):
    model.graph.node[0].domain = "evil.custom"


def ml_domain(model):
    model.opset_import.append(helper.make_opsetid("ai.onnx.ml", 3))


def old_opset(model):
    model.opset_import[0].version = 16


def new_opset(model):
    model.opset_import[0].version = 25


def opset_twice(model):
    model.opset_import.append(helper.make_opsetid("ai.onnx", 18))


def no_opset(model):
    del model.opset_import[:]


def a_function(model):
    model.functions.append(
        helper.make_function("local", "f", ["x"], ["y"], [helper.make_node("Identity", ["x"], ["y"])], [])
    )


def training(model):
    model.training_info.add()


def a_subgraph(model):
    branch = helper.make_graph([], "b", [], [])
    model.graph.node[0].attribute.append(helper.make_attribute("then_branch", branch))


def subgraphs(model):
    attribute = onnx.AttributeProto(name="g", type=onnx.AttributeProto.GRAPHS)
    attribute.graphs.append(helper.make_graph([], "b", [], []))
    model.graph.node[0].attribute.append(attribute)


def sparse(model):
    model.graph.sparse_initializer.add()


def sparse_attribute(model):
    model.graph.node[0].attribute.append(
        onnx.AttributeProto(name="s", sparse_tensor=onnx.SparseTensorProto())
    )


def type_attribute(model):
    model.graph.node[0].attribute.append(onnx.AttributeProto(name="s", tp=onnx.TypeProto()))


def reference_attribute(model):
    model.graph.node[0].attribute.append(onnx.AttributeProto(name="s", ref_attr_name="x"))


def set_attribute(node, name, value):
    kept = [attribute for attribute in node.attribute if attribute.name != name]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute(name, value)])


def huge_attribute(model):
    model.graph.node[0].name = "the first"
    set_attribute(model.graph.node[0], "keepdims", 2**32)


def huge_attributes(model):
    model.graph.node[0].name = "the first"
    model.graph.node[0].attribute.append(helper.make_attribute("axes", [0, -(2**40)]))


def nan_attribute(model):
    norm = next(node for node in model.graph.node if node.op_type == "SimplifiedLayerNormalization")
    set_attribute(norm, "epsilon", float("nan"))


def text_list_attribute(model):
    model.graph.node[0].name = "the first"
    model.graph.node[0].attribute.append(helper.make_attribute("names", ["a", "b"]))


def external(model):
    return next(t for t in model.graph.initializer if t.external_data)


def entry(model, key):
    return next(e for e in external(model).external_data if e.key == key)


def location(value):
    def change(model):
        entry(model, "location").value = value

    return change


def offset(value):
    def change(model):
        entry(model, "offset").value = value

    return change


def length(value):
    def change(model):
        entry(model, "length").value = value

    return change


def checksum(model):
    external(model).external_data.add(key="checksum", value="x")


def external_and_raw(model):
    external(model).raw_data = b"x"


def external_without_location_flag(model):
    external(model).data_location = TensorProto.DEFAULT


def external_constant(model):
    tensor = TensorProto(name="c", data_type=1, dims=[1], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="/etc/passwd")
    model.graph.node.append(helper.make_node("Constant", [], ["c"], value=tensor))


def negative_dim(model):
    external(model).dims[0] = -5


def short_raw(model):
    next(t for t in model.graph.initializer if t.raw_data and len(t.dims)).raw_data += b"1"


def short_values(model):
    model.graph.initializer.append(TensorProto(name="v", data_type=1, dims=[3], float_data=[1.0]))


def values_twice(model):
    model.graph.initializer.append(
        TensorProto(name="v", data_type=7, dims=[1], int64_data=[1], raw_data=b"\2" + bytes(7))
    )


def many_axes(model):
    model.graph.initializer.append(numpy_helper.from_array(np.zeros([1] * 9, np.float32), "deep"))


def weights_overlap(model):
    first, second = [t for t in model.graph.initializer if t.external_data][:2]
    start = next(int(e.value) for e in first.external_data if e.key == "offset")
    next(e for e in second.external_data if e.key == "offset").value = str(start + 4)


def before_it_is_computed(model):
    model.graph.node.append(model.graph.node[0])
    del model.graph.node[0]


def computed_twice(model):
    again = model.graph.node.add()
    again.CopyFrom(model.graph.node[0])
    again.name = "again"


def hides_an_input(model):
    model.graph.node[0].output[0] = "input_ids"


def repeated_otherwise(model):
    model.graph.value_info.append(helper.make_tensor_value_info("embed", 1, [1]))


def output_of_another_shape(model):
    last = model.graph.node.pop()
    model.graph.node.append(helper.make_node("Transpose", [last.input[0]], ["turned"], perm=[0, 2, 1]))
    model.graph.node.append(helper.make_node("Cast", ["turned"], ["logits"], to=1))


def weight_of_another_size(model):
    weight = next(t for t in model.graph.initializer if t.name == "0.gate")
    weight.dims[:] = [weight.dims[1], weight.dims[0]]


def total_is_the_past(model):
    """The sum of both is what the mask has; one name for two lengths would prove anything."""
    model.graph.input[1].type.tensor_type.shape.dim[1].dim_param = "past_sequence_length"


def strings(model):
    model.graph.initializer.append(numpy_helper.from_array(np.asarray(["a"], object), "s"))


def doubles(model):
    model.graph.initializer.append(numpy_helper.from_array(np.zeros(1, np.float64), "d"))


def same_initializer(model):
    model.graph.initializer.append(external(model))


def more_inputs(model):
    model.graph.input.append(helper.make_tensor_value_info("more", 1, [1]))


def fewer_outputs(model):
    del model.graph.output[0]


def other_dtype(model):
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT32


def other_shape(model):
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 3


def no_shape(model):
    model.graph.input[0].type.tensor_type.ClearField("shape")


def sequence_input(model):
    model.graph.input[0].CopyFrom(helper.make_tensor_sequence_value_info("input_ids", 7, [1]))


def annotation(model):
    model.graph.quantization_annotation.add()


FAULTS = {
    other_op: "it uses the operator 'DepthToSpace'",
    other_domain: "it uses the operator 'evil.custom.",
    ml_domain: "it imports opset ai.onnx.ml 3",
    old_opset: "it imports opset ai.onnx 16",
    new_opset: "it imports opset ai.onnx 25",
    opset_twice: "it imports opset ai.onnx 18",
    no_opset: "without importing its opset",
    a_function: "the model holds field 25",
    training: "the model holds field 20",
    a_subgraph: "holds field 6",
    subgraphs: "holds field 11",
    sparse: "the graph holds field 15",
    sparse_attribute: "holds field 22",
    type_attribute: "holds field 14",
    reference_attribute: "holds field 21",
    text_list_attribute: "node the first (ReduceSum): the attribute names = ('a', 'b'), wanted none of that name",
    huge_attribute: "node the first (ReduceSum): the attribute keepdims = 4294967296, wanted 0 to 1",
    huge_attributes: "node the first (ReduceSum): the attribute axes = (0, -1099511627776), wanted none of that name",
    nan_attribute: "(SimplifiedLayerNormalization): the attribute epsilon = nan, wanted 0 to 1",
    location("../weights.bin"): "lies in '../weights.bin', not in weights.bin",
    location("/etc/passwd"): "lies in '/etc/passwd'",
    location("weights.bin\0"): "lies in ",
    location("other.bin"): "lies in 'other.bin'",
    offset(str(SIZE)): "lies outside weights.bin",
    offset("-1"): "lies outside weights.bin",
    offset("1e3"): "lies outside weights.bin",
    offset("1_0"): "lies outside weights.bin",
    offset("9" * 30): "lies outside weights.bin",
    length("1"): "has another size there",
    length(""): "has another size there",
    checksum: "has external data with",
    external_and_raw: "not in weights.bin",
    external_without_location_flag: "has external data with",
    external_constant: "it uses the operator 'Constant'",
    negative_dim: "has the shape",
    short_raw: "bytes",
    short_values: "another number of values",
    values_twice: "tensor 'v' has its values twice",
    many_axes: "tensor 'deep' has the shape [1, 1, 1, 1, 1, 1, 1, 1, 1]",
    weights_overlap: "overlap in weights.bin",
    before_it_is_computed: "is not computed before it",
    computed_twice: "node again (ReduceSum): output 'ReduceSum_0_0' is a value already",
    hides_an_input: "(ReduceSum): output 'input_ids' is a value already",
    repeated_otherwise: "it says that 'embed' is float32 [1], which is no constant of it",
    output_of_another_shape: "its output 'logits' is float32 [batch_size, 320, 1], declared as float32 ['batch_size', 1, 320]",
    weight_of_another_size: "(MatMul): the inner dimension of [batch_size, 1, 32] and [48, 32] is 32, wanted 48",
    total_is_the_past: "its input 'attention_mask' (int64, ['batch_size', 'past_sequence_length'])",
    strings: "field 6",
    doubles: "has the data type 11",
    same_initializer: "two initializers are named",
    more_inputs: "its input 'more'",
    fewer_outputs: "its outputs are not those of the manifest",
    other_dtype: "its input 'input_ids' (int32",
    other_shape: "its input 'input_ids' (int64, [3,",
    no_shape: "has no tensor type with a shape",
    sequence_input: "holds field 4",
    annotation: "the graph holds field 14",
}


@pytest.mark.parametrize(
    ("fault", "line"), FAULTS.items(), ids=lambda value: getattr(value, "__qualname__", None)
)
def test_a_graph_that_the_exporter_would_not_write_is_refused(fault, line):
    model, info = make()
    fault(model)
    with pytest.raises(BundleError) as caught:
        audit(model, info)
    assert str(caught.value).startswith("decode.onnx is not one of our graphs: ")
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def lstm(**attributes):
    """A graph of one LSTM with 5 cells, over rows of 4 numbers."""
    shapes = {"input_features": ["B", "T", 4], "y": ["T", 1, "B", 5]}
    values = {name: helper.make_tensor_value_info(name, 1, shape) for name, shape in shapes.items()}
    weights = {"W": np.zeros((1, 20, 4), np.float32), "R": np.zeros((1, 20, 5), np.float32)}
    nodes = [
        helper.make_node("Transpose", ["input_features"], ["x"], "turn", perm=[1, 0, 2]),
        helper.make_node("LSTM", ["x", "W", "R"], ["y"], "cells", hidden_size=5, **attributes),
    ]
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "g", [values["input_features"]], [values["y"]], initializers)
    info = GraphInfo(
        file="decode.onnx",
        inputs=(TensorInfo(name="input_features", dtype="float32", shape=("B", "T", 4)),),
        outputs=(TensorInfo(name="y", dtype="float32", shape=("T", 1, "B", 5)),),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), info


def test_an_lstm_passes_and_its_matrices_are_counted_as_packed():
    for activations in (["Sigmoid"] * 3, ["Sigmoid", "Tanh", "Tanh"]):
        summary = audit(*lstm(activations=activations))
        assert summary.ops == {"LSTM": 1, "Transpose": 1}
        assert summary.packable_bytes == 4 * (20 * 4 + 20 * 5)


def test_an_lstm_with_other_activations_is_refused():
    with pytest.raises(
        BundleError,
        match=r"node cells \(LSTM\): the attribute activations = \('Sigmoid', 'Affine', 'Tanh'\), wanted Sigmoid ",
    ):
        audit(*lstm(activations=["Sigmoid", "Affine", "Tanh"]))


def test_weights_that_end_early_are_refused():
    model, info = make()
    with pytest.raises(BundleError, match=r"lies outside weights\.bin"):
        audit(model, info, SIZE - 1)


def test_the_model_that_kills_onnxruntime_is_refused():
    """A 97-byte graph with a block size of 2^32: SIGFPE while loading."""
    node = helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2**32)
    value = [helper.make_tensor_value_info(name, 1, [1, 4, 1, 1]) for name in "xy"]
    model = helper.make_model(
        helper.make_graph([node], "g", value[:1], value[1:]),
        opset_imports=[helper.make_opsetid("", 18)],
        ir_version=8,
    )
    with pytest.raises(BundleError, match="DepthToSpace"):
        audit(model, GraphInfo(file="decode.onnx", inputs=(), outputs=()))


def test_merged_messages_cannot_hide_a_second_graph():
    """Protobuf merges a field that comes twice; onnxruntime would see the union."""
    model, info = make()
    other = onnx.ModelProto()
    other.graph.node.append(helper.make_node("DepthToSpace", ["x"], ["y"], blocksize=2))
    with pytest.raises(BundleError, match="the model holds graph twice"):
        audit_graph(model.SerializeToString() + other.SerializeToString(), info, SIZE, CONTEXT)


def test_a_graph_that_ends_early_is_refused_wherever_it_ends():
    model, info = make()
    data = model.SerializeToString()
    for size in [*range(0, len(data), 97), *range(len(data) - 40, len(data))]:
        with pytest.raises(BundleError, match=r"^decode\.onnx is not one of our graphs: "):
            audit_graph(data[:size], info, SIZE, CONTEXT)


def test_damaged_bytes_never_end_in_a_traceback():
    model, info = make()
    data = model.SerializeToString()
    rng = random.Random(0)
    for _ in range(400):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 8)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        if rng.random() < 0.5:
            del changed[rng.randrange(len(changed)) :]
        try:
            audit_graph(bytes(changed), info, SIZE, CONTEXT)
        except BundleError as error:
            assert "\n" not in str(error)  # noqa: PT017 (some changes, e.g. of a name, are harmless)


@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\xff" * 20, b"\x3a\xff\xff\xff\xff\x0f", b"\x08" + b"\x80" * 11, b"\x0b"]
)
def test_bytes_that_are_no_model_are_refused(data):
    with pytest.raises(BundleError, match=r"^decode\.onnx is not one of our graphs: "):
        audit_graph(data, make()[1], SIZE, CONTEXT)


def test_the_wire_reader_takes_the_three_shapes_of_numbers_and_refuses_the_rest():
    schema = {
        1: ("n", "int"),
        2: ("many", "ints"),
        3: ("x", "float"),
        4: ("name", "text"),
        5: ("ws", "floats"),
    }

    def read(*data: int):
        return read_message(memoryview(bytes(data)), schema, "it")

    minus_one = [*[0xFF] * 9, 0x01]
    assert read(0x08, *minus_one).number("n") == -1
    assert read(0x12, 3, 1, 0x80, 1, 0x10, 7).numbers("many") == [1, 128, 7]  # packed, then one more
    assert read(0x1D, 0, 0, 0x80, 0x3F).floats("x") == [1.0]
    assert read(0x2A, 4, 0, 0, 0, 0x40).floats("ws") == [2.0]
    for data in (
        [0x22, 5, 65],
        [0x08],
        [0x08, *[0x80] * 9, 2],
        [0x1D, 0],
        [0x0D, 0, 0, 0, 0],
        [0x22, 1, 0xFF],
        [0x2A, 3, 0, 0, 0],
    ):
        with pytest.raises(WireError):
            read(*data)


def test_every_operator_of_the_list_exists():
    """A misspelled name would allow nothing; onnx and onnxruntime know them all."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    known = {(schema.domain, schema.name) for schema in state.get_all_operator_schema()}
    known |= {(kernel.domain, kernel.op_name) for kernel in state.get_all_opkernel_def()}
    known |= {(schema.domain, schema.name) for schema in onnx.defs.get_all_schemas()}
    assert {(domain, name) for domain, names in OPS.items() for name in names} <= known


def test_no_operator_of_the_list_has_a_subgraph():
    for schema in onnx.defs.get_all_schemas_with_history():
        if schema.domain == "" and schema.name in OPS[""]:
            kinds = {attribute.type for attribute in schema.attributes.values()}
            assert onnx.defs.OpSchema.AttrType.GRAPH not in kinds


def patches(**attributes):
    """A graph of one Conv: patches of 4 x 4 of an image of 3 x 8 x 8, in 5 channels."""
    values = {
        "pixel_values": helper.make_tensor_value_info("pixel_values", 1, ["B", 3, 8, 8]),
        "y": helper.make_tensor_value_info("y", 1, ["B", 5, 2, 2]),
    }
    weights = numpy_helper.from_array(np.zeros((5, 3, 4, 4), np.float32), "W")
    node = helper.make_node("Conv", ["pixel_values", "W"], ["y"], "patches", **attributes)
    graph = helper.make_graph([node], "g", [values["pixel_values"]], [values["y"]], [weights])
    info = GraphInfo(
        file="encode.onnx",
        inputs=(TensorInfo(name="pixel_values", dtype="float32", shape=("B", 3, 8, 8)),),
        outputs=(TensorInfo(name="y", dtype="float32", shape=("B", 5, 2, 2)),),
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8), info


def test_patches_pass_and_a_convolution_that_does_not_fit_is_refused():
    assert audit(*patches(strides=[4, 4], kernel_shape=[4, 4])).packable_bytes == 4 * 5 * 3 * 16
    for attributes, line in (
        ({"strides": [2, 2]}, "declared as"),
        ({"strides": [2**32, 4]}, "strides"),
        ({"strides": [4, 4], "group": 2}, "wanted 2 groups of channels"),
        ({"strides": [4, 4], "kernel_shape": [5, 4]}, "wanted the same"),
        ({"strides": [4, 4], "dilations": [9, 1]}, "wanted one that fits"),
        ({"strides": [4]}, "wanted 2 numbers"),
        ({"strides": [4, 4], "auto_pad": "SAME_UPPER"}, "auto_pad"),
    ):
        with pytest.raises(BundleError, match=line):
            audit(*patches(**attributes))


def test_inputs_after_those_that_may_be_absent_are_wanted_too():
    """GroupQueryAttention must have its seventh; key and value before it may be left out."""
    attention = contract_of("com.microsoft.GroupQueryAttention", 18)
    assert attention is not None
    for count in range(7):
        with pytest.raises(ContractError, match=f"{count} inputs, wanted 7 to 14"):
            check_inputs(attention, [Value("float32", (1,))] * count)


@pytest.mark.parametrize(
    ("dtype", "perm", "passes"), [(1, [1, 0, 2], True), (10, [1, 0, 2], False), (10, [0, 2, 1], True)]
)
def test_a_half_precision_product_behind_a_transpose_of_rows_is_refused(dtype, perm, passes):
    """It ends onnxruntime 1.31 while it loads the graph."""
    shape = ["T", "B", 4] if perm == [1, 0, 2] else ["B", 4, "T"]
    width = shape[2]
    x = helper.make_tensor_value_info("input_features", dtype, ["B", "T", 4])
    weights = np.zeros((4, 6), np.float32 if dtype == 1 else np.float16)
    nodes = [helper.make_node("Transpose", ["input_features"], ["x"], "turn", perm=perm)]
    if width == 4:
        nodes.append(helper.make_node("MatMul", ["x", "W"], ["y"], "product"))
        out = ["T", "B", 6]
    else:
        nodes.append(helper.make_node("MatMul", ["input_features", "x"], ["y"], "product"))
        out = ["B", "T", "T"]
    y = helper.make_tensor_value_info("y", dtype, out)
    initializers = [numpy_helper.from_array(weights, "W")] if width == 4 else []
    graph = helper.make_graph(nodes, "g", [x], [y], initializers)
    name = "float32" if dtype == 1 else "float16"
    info = GraphInfo(
        file="encode.onnx",
        inputs=(TensorInfo(name="input_features", dtype=name, shape=("B", "T", 4)),),
        outputs=(TensorInfo(name="y", dtype=name, shape=tuple(out)),),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    if passes:
        audit(model, info)
        return
    with pytest.raises(BundleError, match=r"node product \(MatMul\): a product of a constant in float16"):
        audit(model, info)


@pytest.mark.parametrize("version", [-1, 0, 3, 7, 13, 2**31])
def test_a_file_version_that_the_exporter_does_not_write_is_refused(version):
    """By an old one onnxruntime takes inputs that have a default for constants, and the runtime cannot give them."""
    model, info = make()
    model.ir_version = version
    with pytest.raises(BundleError, match=rf"its ir_version is {version}$"):
        audit(model, info)


def test_lists_of_no_numbers_and_of_one_go_together():
    """A list of one broadcasts to none at all; the audit fell over its own zip."""
    values = [Value("int64", (0,), ()), Value("int64", (1,), (3,))]
    for inputs in (values, values[::-1]):
        (made,) = added(Call(18, inputs, {}, 1))
        assert (made.shape, made.elements) == ((0,), ())
