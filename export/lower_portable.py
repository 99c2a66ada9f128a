"""`tfmx::` nodes as standard ONNX ops: the `portable` target, and what the `ort` target does not fuse."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from .layout import BlockLayout, Layout
from .lower_attention import AttentionNode
from .lower_basic import END, dims, given
from .lower_recurrent import FeatureNode, RecurrentLowering


class PortableLowering(RecurrentLowering):
    growth = "append"

    def select(self, x: ir.Value, keep: ir.Value) -> ir.Value:
        """The last `keep` columns; 0 is all, since a Slice from -0 starts at the front."""
        start = self.b.op("Neg", self.b.op("Reshape", keep, self.b.const([1])))
        return self.b.slice(x, start, self.b.const([END]), 1)

    def lower(self, node: ir.Node, inputs: Sequence[ir.Value | None], layout: Layout) -> Sequence[ir.Value]:
        """`layout`: how the node's weight lies in the file, if it has one."""
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        x, second, third, *_ = [*inputs, None, None]
        x = given(x)
        match node.op_type:
            case "Embedding" if isinstance(layout, BlockLayout):
                return [self.block_embedding(x, given(second), layout)]
            case "Embedding":
                return [self.embedding(x, given(second), is_column=layout == "columns")]
            case "Linear" if isinstance(layout, BlockLayout):
                return [self.block_linear(x, given(second), third, layout)]
            case "Linear":
                return [self.linear(x, given(second), third, is_column=layout == "columns")]
            case "Norm":
                return [self.norm(x, given(second), third, attributes["kind"], attributes["eps"])]
            case "Activation":
                return [self.activation(x, attributes["kind"])]
            case "GatedActivation":
                return [self.gated_activation(x, attributes["kind"])]
            case "Patches":
                return [self.patches(x, node, attributes["patch"])]
            case "Prepend":
                return [self.prepend(x, given(second))]
            case "NewMask":
                return [self.cached(("new mask", x), lambda: self.new_mask(x, given(second)))]
            case "WithColumns":  # a fact for the trace alone
                return [x]
            case "ByHead":
                return [self.by_head(x, attributes["heads"], attributes["head_dim"])]
            case "Attention":
                return self.attention(AttentionNode.parse(node, inputs))
            case "CrossAttention":
                _, key, value, *mask = inputs
                return self.cross_attention(
                    x, given(key), given(value), mask[0] if mask else None, attributes
                )
            case "RandomFeatureAttention":
                return self.random_feature_attention(FeatureNode.parse(node, inputs))
            case "Lstm":
                return self.lstm(inputs, attributes, hidden_size=dims(given(node.inputs[5]))[1])
            case "Recurrence":
                return self.recurrence(x, given(second), given(third))
            case "RecurrenceWeights":
                return [self.recurrence_weights(x, given(second), given(third))]
        raise AssertionError(f"there is no lowering for {node.op_type}")
