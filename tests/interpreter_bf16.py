"""Mend bfloat16 in Triton's interpreter (3.6 to 3.9), for tests.

The interpreter keeps bfloat16 as its 16 raw bits and calculates with those as
integers. A GPU calculates in float32 and rounds to nearest even; after
``install()`` the interpreter does so too.
"""

import functools

import numpy as np


@functools.cache
def install() -> None:
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle

    def is_bf16(value):
        return isinstance(value, Handle) and value.dtype.scalar == tl.bfloat16

    def widened(value):
        """A bfloat16 handle as float32; anything else as it is."""
        if not is_bf16(value):
            return value
        bits = np.asarray(value.data).astype(np.uint32) << 16
        return Handle(bits.view(np.float32), tl.float32)

    def rounded(value):
        """A float32 handle rounded to bfloat16."""
        return Handle(round_to_bf16(value.data), tl.bfloat16)

    def in_float32(operation):
        @functools.wraps(operation)
        def run(self, *arguments):
            if not any(map(is_bf16, arguments)):
                return operation(self, *arguments)
            result = operation(self, *map(widened, arguments))
            is_float = np.asarray(result.data).dtype == np.float32
            return rounded(result) if is_float else result  # a comparison gives bool

        return run

    for name in ("binary_op", "unary_op", "create_fma", "create_clampf", "create_fabs"):
        setattr(Builder, name, in_float32(getattr(Builder, name)))

    cast, dot = Builder.cast_impl, Builder.create_dot

    def cast_impl(self, source, to):
        source = widened(source)
        if to.scalar == tl.bfloat16:
            return rounded(cast(self, source, tl.float32))
        return source if source.dtype.scalar == to.scalar else cast(self, source, to)

    def create_dot(self, a, b, c, *rest):
        return dot(self, widened(a), widened(b), c, *rest)

    Builder.cast_impl, Builder.create_dot = cast_impl, create_dot
    Builder.get_bf16 = lambda self, value: rounded(
        Handle(np.array([value], np.float32), tl.float32)
    )

    def reduced_in_float32(operation):
        """Reductions and scans call NumPy themselves, so they are wrapped as a whole."""

        def run(self, tensors):
            is_narrow = [tensor.dtype == tl.bfloat16 for tensor in tensors]
            if not any(is_narrow):
                return operation(self, tensors)
            wide = (
                self.to_tensor(widened(t.handle).data, tl.float32) if narrow else t
                for t, narrow in zip(tensors, is_narrow)
            )
            out = operation(self, tuple(wide))
            many = isinstance(out, (list, tuple))
            results = [
                back(self, result) if narrow and result.dtype == tl.float32 else result
                for result, narrow in zip(out if many else [out], is_narrow)
            ]
            return results if many else results[0]

        def back(self, result):
            data = rounded(result.handle).data
            return self.to_tensor(data if result.type.is_block() else data.reshape(()), tl.bfloat16)

        return run

    for kind in (interpreter.ReduceOps, interpreter.ScanOps):
        kind.apply_impl = reduced_in_float32(kind.apply_impl)


def round_to_bf16(values) -> np.ndarray:
    """The bits of float32 values rounded to bfloat16, to nearest even."""
    values = np.asarray(values, np.float32)
    bits = values.view(np.uint32)
    bits = bits + (0x7FFF + ((bits >> 16) & 1))
    return np.where(np.isnan(values), 0x7FC0, bits >> 16).astype(np.uint16)
