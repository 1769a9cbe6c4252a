"""Ops that move data without computing: views, slices, concatenation, cache writes.

    %q: f32[8,128,4,32] = slice(%qkv) {starts = (0, 0, 0, 0), stops = (8, 128, 4, 32)}
"""

from __future__ import annotations

import math

import numpy as np

from euler_ir.op import Composite, Op
from euler_ir.types import I32, ShapeError, TensorType


class Reshape(Op):
    """The same elements in row-major order under another shape; a view."""
    name = "reshape"
    shape: tuple[int, ...]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if math.prod(self.shape) != x.size or any(n < 0 for n in self.shape):
            raise ShapeError(f"a shape of {x.size} elements for {x}, got {self.shape}")
        return (x.with_shape(self.shape),)

    def evaluate(self, x):
        return (np.reshape(x, self.shape),)

    def alias(self, *operands: TensorType) -> int | None:
        return 0

    def backward(self, b, node, grads):
        return [b.reshape(grads[0], node.inputs[0].shape)]


class Transpose(Op):
    """Axis i of the result is axis `permutation[i]` of x."""
    name = "transpose"
    permutation: tuple[int, ...]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if sorted(self.permutation) != list(range(x.rank)):
            raise ShapeError(f"a permutation of the {x.rank} axes of {x}, got {self.permutation}")
        return (x.with_shape(tuple(x.shape[axis] for axis in self.permutation)),)

    def evaluate(self, x):
        return (np.array(np.transpose(x, self.permutation), order="C"),)

    def backward(self, b, node, grads):
        inverse = tuple(int(axis) for axis in np.argsort(self.permutation))
        return [b.transpose(grads[0], inverse)]


class Slice(Op):
    """y = x[starts[0]:stops[0], …]; a view where the part is contiguous in memory."""
    name = "slice"
    starts: tuple[int, ...]
    stops: tuple[int, ...]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if not len(self.starts) == len(self.stops) == x.rank or any(
                not 0 <= start <= stop <= n
                for start, stop, n in zip(self.starts, self.stops, x.shape, strict=False)):
            raise ShapeError(f"0 ≤ starts ≤ stops ≤ shape for {x}, got {self.starts}, {self.stops}")
        return (x.with_shape(tuple(b - a for a, b in zip(self.starts, self.stops, strict=True))),)

    def evaluate(self, x):
        return (np.array(x[tuple(map(slice, self.starts, self.stops))], order="C"),)

    def alias(self, *operands: TensorType) -> int | None:
        """Contiguous when, after extents of 1, one axis is cut and all later ones are whole."""
        (x,) = operands
        sizes = [b - a for a, b in zip(self.starts, self.stops, strict=True)]
        first = next((i for i, n in enumerate(sizes) if n != 1), x.rank)
        if any(sizes[i] != x.shape[i] for i in range(first + 1, x.rank)):
            return None
        return self.offset(x.shape)

    def offset(self, shape: tuple[int, ...]) -> int:
        """Row-major place of the first element in an operand of this shape."""
        offset = 0
        for start, extent in zip(self.starts, shape, strict=True):
            offset = offset * extent + start
        return offset

    def backward(self, b, node, grads):
        return [b.pad(grads[0], node.inputs[0].shape, self.starts)]


class Pad(Op):
    """Zeros of `shape` with x placed at `starts`."""
    name = "pad"
    shape: tuple[int, ...]
    starts: tuple[int, ...]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if not len(self.starts) == len(self.shape) == x.rank or any(
                start < 0 or start + n > extent for start, n, extent
                in zip(self.starts, x.shape, self.shape, strict=False)):
            raise ShapeError(f"a shape that holds {x} at {self.starts}, got {self.shape}")
        return (x.with_shape(self.shape),)

    def evaluate(self, x):
        y = np.zeros(self.shape, x.dtype)
        y[tuple(slice(a, a + n) for a, n in zip(self.starts, x.shape, strict=True))] = x
        return (y,)

    def backward(self, b, node, grads):
        stops = tuple(a + n for a, n in zip(self.starts, node.inputs[0].shape, strict=True))
        return [b.slice(grads[0], self.starts, stops)]


class Concat(Op):
    """Operands side by side along `axis`."""
    name = "concat"
    axis: int

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        if not operands:
            raise ShapeError("at least one operand, got none")
        first = operands[0]
        if not 0 <= self.axis < first.rank:
            raise ShapeError(f"an axis of {first}, got {self.axis}")
        for x in operands:
            if x.dtype is not first.dtype or _without(x.shape, self.axis) != _without(
                    first.shape, self.axis):
                raise ShapeError(f"operands that differ along axis {self.axis} only, got "
                                 + ", ".join(map(str, operands)))
        total = sum(x.shape[self.axis] for x in operands)
        return (first.with_shape(
            first.shape[:self.axis] + (total,) + first.shape[self.axis + 1:]),)

    def evaluate(self, *operands):
        return (np.concatenate(operands, self.axis),)

    def backward(self, b, node, grads):
        (g,), result, place = grads, [], 0
        for x in node.inputs:
            starts, stops = [0] * len(g.shape), list(g.shape)
            starts[self.axis], stops[self.axis] = place, place + x.shape[self.axis]
            place = stops[self.axis]
            result.append(b.slice(g, tuple(starts), tuple(stops)))
        return result


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1:]


class Broadcast(Op):
    """x repeated to `shape` under numpy's rules. Kernels that use it read x in place."""
    name = "broadcast"
    shape: tuple[int, ...]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        padded = (1,) * (len(self.shape) - x.rank) + x.shape
        if x.rank > len(self.shape) or any(
                n not in (1, extent) for n, extent in zip(padded, self.shape, strict=True)):
            raise ShapeError(f"a shape that {x} broadcasts to, got {self.shape}")
        return (x.with_shape(self.shape),)

    def evaluate(self, x):
        return (np.broadcast_to(x, self.shape),)

    def backward(self, b, node, grads):
        (x,), (g,) = node.inputs, grads
        padded = (1,) * (len(self.shape) - len(x.shape)) + x.shape
        axes = tuple(i for i, n in enumerate(padded) if n == 1 and self.shape[i] != 1)
        return [b.reshape(b.reduce_sum(g, axes) if axes else g, x.shape)]


class UpdateSlice(Op):
    """The buffer with `new` written at `position` along `axis`: a KV cache's functional write.

    buffer [..., S, ...], new [..., n, ...], position i32 [] → like buffer. Rows that would lie
    outside the buffer are dropped. With the buffer donated, only the new rows are written."""
    name = "update_slice"
    axis: int

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        buffer, new, position = operands
        if (position != TensorType(I32, ()) or new.dtype is not buffer.dtype
                or new.rank != buffer.rank or not 0 <= self.axis < buffer.rank
                or _without(new.shape, self.axis) != _without(buffer.shape, self.axis)
                or new.shape[self.axis] > buffer.shape[self.axis]):
            raise ShapeError("buffer [.., S, ..], new [.., n ≤ S, ..], position i32[], got "
                             f"{buffer}, {new}, {position} along axis {self.axis}")
        return (buffer,)

    def evaluate(self, buffer, new, position):
        result, (target, source) = buffer.copy(), _overlap(
            int(position), new.shape[self.axis], buffer.shape[self.axis], self.axis)
        result[target] = new[source]
        return (result,)

    def backward(self, b, node, grads):
        (_, new, position), (g,) = node.inputs, grads
        zero = b.full(0.0, new.dtype, new.shape)
        return [b.update_slice(g, zero, position, self.axis),
                b.dynamic_slice(g, position, self.axis, new.shape[self.axis]), None]


class DynamicSlice(Op):
    """`size` rows along `axis` from `position` (i32 []) on; rows outside x are 0."""
    name = "dynamic_slice"
    axis: int
    size: int

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        x, position = operands
        if (position != TensorType(I32, ()) or not 0 <= self.axis < x.rank
                or not 0 <= self.size <= x.shape[self.axis]):
            raise ShapeError(f"x with {self.size} rows or more along axis {self.axis} and position "
                             f"i32[], got {x} and {position}")
        return (x.with_shape(x.shape[:self.axis] + (self.size,) + x.shape[self.axis + 1:]),)

    def evaluate(self, x, position):
        shape = x.shape[:self.axis] + (self.size,) + x.shape[self.axis + 1:]
        result = np.zeros(shape, x.dtype)
        source, target = _overlap(int(position), self.size, x.shape[self.axis], self.axis)
        result[target] = x[source]
        return (result,)

    def backward(self, b, node, grads):
        x, position = node.inputs
        zero = b.full(0.0, x.dtype, x.shape)
        return [b.update_slice(zero, grads[0], position, self.axis), None]


def _overlap(position: int, size: int, extent: int, axis: int):
    """Index tuples into the buffer and into the `size` rows at `position`, cut to the buffer."""
    start, stop = min(max(position, 0), extent), min(max(position + size, 0), extent)
    whole = (slice(None),) * axis
    return (*whole, slice(start, stop)), (*whole, slice(start - position, stop - position))


class Split(Composite):
    """x cut along `axis` into pieces of these sizes, one result each; its gradient is one concat.

    Passes replace it by slices once gradients are built."""
    name = "split"
    axis: int
    sizes: tuple[int, ...]

    def infer(self, *operands: TensorType) -> tuple[TensorType, ...]:
        (x,) = operands
        if (not 0 <= self.axis < x.rank or sum(self.sizes) != x.shape[self.axis]
                or min(self.sizes, default=-1) < 0):
            raise ShapeError(f"sizes that add up to axis {self.axis} of {x}, got {self.sizes}")
        return tuple(x.with_shape(x.shape[:self.axis] + (size,) + x.shape[self.axis + 1:])
                     for size in self.sizes)

    def decompose(self, b, x):
        stops = [int(stop) for stop in np.cumsum(self.sizes)]
        return [b.part(x, self.axis, stop - size, stop)
                for size, stop in zip(self.sizes, stops, strict=True)]

    def backward(self, b, node, grads):
        pieces = [b.full(0.0, value.dtype, value.shape) if grad is None else grad
                  for value, grad in zip(node.outputs, grads, strict=True)]
        return [b.concat(pieces, self.axis)]
