"""ONNX graphs, written node by node.

A `Scope` is a graph or the body of a loop in it; a body sees the tensors of the graphs around it.
Constants are kept once, in the outermost graph, in the precision they were given in, and cast to
float64 there: that is the precision of all arithmetic.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from functools import partialmethod
from typing import Any

import numpy as np
import torch
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, helper, numpy_helper

OPSET = 17
ML, ML_OPSET = "ai.onnx.ml", 3  # of lookups of text
_KINDS = {"double": TensorProto.DOUBLE, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


class Value:
    """The name of a tensor in a scope, with arithmetic."""

    __array_ufunc__ = None  # an array on the left leaves the arithmetic to us

    def __init__(self, scope: Scope, name: str) -> None:
        self.scope, self.name = scope, name

    def _with(self, kind: str, other: Operand, swapped: bool = False) -> Value:
        pair = (other, self) if swapped else (self, other)
        # In the innermost scope: only that sees both.
        inner = isinstance(other, Value) and other.scope.depth > self.scope.depth
        return (other.scope if inner else self.scope).op(kind, *pair)  # type: ignore[union-attr]

    __add__ = __radd__ = partialmethod(_with, "Add")
    __sub__, __rsub__ = partialmethod(_with, "Sub"), partialmethod(_with, "Sub", swapped=True)
    __mul__ = __rmul__ = partialmethod(_with, "Mul")
    __truediv__ = partialmethod(_with, "Div")
    __rtruediv__ = partialmethod(_with, "Div", swapped=True)
    __matmul__ = partialmethod(_with, "MatMul")
    __gt__, __lt__ = partialmethod(_with, "Greater"), partialmethod(_with, "Less")

    def __neg__(self) -> Value:
        return self.scope.op("Neg", self)


Operand = Value | np.ndarray | torch.Tensor | float
# Of the body of a loop: whether to go on (None: yes), what is carried along, what is stacked up.
Trip = tuple[Value | None, list[Value], list[Value]]


class Scope:
    """Nodes one after the other. Arrays and numbers among the inputs become constants."""

    def __init__(self, outer: Scope | None = None, taken: Iterable[str] = ()) -> None:
        self.root: Scope = self if outer is None else outer.root
        self.depth: int = 0 if outer is None else outer.depth + 1
        self.nodes: list[NodeProto] = []
        if outer is None:
            self.constants: dict[str, TensorProto] = {}
            self.wide: dict[str, str] = {}
            self.count = 0
            self.taken = frozenset(taken)

    def name(self) -> str:
        """A name that no other tensor has."""
        self.root.count += 1
        return self.free(f"t{self.root.count}")

    def free(self, name: str) -> str:
        """The name, with an underscore behind it if it is taken."""
        while name in self.root.taken:
            name += "_"
        return name

    def value(self, name: str) -> Value:
        """A tensor of this name that is an input."""
        return Value(self, name)

    def op(self, kind: str, *inputs: Operand, **attributes: Any) -> Value:
        return self.ops(kind, 1, *inputs, **attributes)[0]

    def ops(self, kind: str, n: int, *inputs: Operand, **attributes: Any) -> list[Value]:
        names = [x.name if isinstance(x, Value) else self.constant(x) for x in inputs]
        outputs = [self.name() for _ in range(n)]
        self.nodes.append(helper.make_node(kind, names, outputs, **attributes))
        return [Value(self, name) for name in outputs]

    def constant(self, x: np.ndarray | torch.Tensor | float) -> str:
        """The name of an array: float64 whatever it was, or int64, or strings."""
        if isinstance(x, torch.Tensor):
            x = x.detach().cpu().numpy()
        # Integers and text are arrays by intent; plain numbers are float64.
        array = np.asarray(x) if isinstance(x, np.ndarray) else np.asarray(x, dtype=np.float64)
        key = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
        key.update(repr(array.tolist()).encode() if array.dtype == object else array.tobytes())
        root, text = self.root, key.hexdigest()
        if text not in root.constants:
            own = self.free(f"c{len(root.constants)}")
            root.constants[text] = numpy_helper.from_array(array, own)
        name = root.constants[text].name
        if array.dtype != np.float32:
            return name
        if text not in root.wide:
            root.wide[text] = root.name()
            cast = helper.make_node("Cast", [name], [root.wide[text]], to=TensorProto.DOUBLE)
            # First of all: whatever uses it comes later.
            root.nodes.insert(0, cast)
        return root.wide[text]

    def rename(self, x: Value, name: str) -> None:
        """Give the output of the last node a name of its own."""
        node = self.nodes[-1]
        assert list(node.output) == [x.name]
        node.output[0] = name

    # --- shorthand ----------------------------------------------------------------------------

    def cast(self, x: Value, kind: str) -> Value:
        """x as "double", "int64" or "bool"."""
        return self.op("Cast", x, to=_KINDS[kind])

    def sum(self, x: Value, axis: int, keepdims: bool = True) -> Value:
        return self.op("ReduceSum", x, np.array([axis]), keepdims=int(keepdims))

    def unsqueeze(self, x: Value, axis: int) -> Value:
        return self.op("Unsqueeze", x, np.array([axis]))

    def column(self, x: Value) -> Value:
        return self.op("Reshape", x, np.array([-1, 1]))

    def squeeze(self, x: Value) -> Value:
        """A tensor with one element as a scalar."""
        return self.op("Reshape", x, np.array([], dtype=np.int64))

    def range(self, start: Operand, stop: Operand) -> Value:
        """start, start + 1, … below stop; all float64, or all int64."""
        one = np.array(1, np.int64) if isinstance(start, np.ndarray) else 1.0
        return self.op("Range", start, stop, one)

    def loop(
        self,
        trips: Operand,
        carried: Sequence[tuple[Operand, str]],
        body: Callable[[Scope, Value, list[Value]], Trip],
        n_stacked: int = 0,
    ) -> list[Value]:
        """Run `body` up to `trips` times.

        `carried`: first values, each declared with its type.
        """
        inner = Scope(self)
        i, condition = self.name(), self.name()
        names = [self.name() for _ in carried]
        go_on, values, stacked = body(inner, inner.value(i), [inner.value(n) for n in names])
        go_on = inner.op("Identity", inner.value(condition)) if go_on is None else go_on
        outputs = [inner.op("Identity", v) for v in (*values, *stacked)]
        declare = helper.make_tensor_value_info
        kinds = [_KINDS[kind] for _, kind in carried]
        given = [declare(i, TensorProto.INT64, []), declare(condition, TensorProto.BOOL, [])]
        given += map(declare, names, kinds, [None] * len(names))
        left = [declare(go_on.name, TensorProto.BOOL, [])]
        kinds += [TensorProto.DOUBLE] * n_stacked
        left += [declare(out.name, kind, None) for out, kind in zip(outputs, kinds, strict=True)]
        graph = helper.make_graph(inner.nodes, f"body_{i}", given, left)
        start = np.array(True)
        inputs = [trips, start, *(x for x, _ in carried)]
        return self.ops("Loop", len(outputs), *inputs, body=graph)

    def graph(self, inputs: list[Any], outputs: list[Any]) -> GraphProto:
        constants = list(self.root.constants.values())
        return helper.make_graph(
            _needed(self.nodes, outputs), "conjugp", inputs, outputs, constants
        )


def _needed(nodes: list[NodeProto], outputs: list[Any]) -> list[NodeProto]:
    """The nodes that the outputs depend on."""
    wanted, kept = {out.name for out in outputs}, []
    for node in reversed(nodes):
        if wanted & set(node.output):
            wanted |= _reads(node)
            kept.append(node)
    return kept[::-1]


def _reads(node: NodeProto) -> set[str]:
    """What a node reads, the bodies of loops included."""
    names = set(node.input)
    for attribute in node.attribute:
        if attribute.type == AttributeProto.GRAPH:
            for inner in attribute.g.node:
                names |= _reads(inner)
            names |= {out.name for out in attribute.g.output}
    return names
