"""Lets FLA's Triton kernels run without a GPU, under Triton's interpreter.

`install()` mends what the interpreter of triton 3.8 and 3.9 lacks for FLA 0.6. It reaches into private parts
of both, so tests skip on other versions of triton. The process must have been started with
`TRITON_INTERPRET=1`, which triton reads when it is imported.
"""

import builtins
import importlib.metadata
import importlib.util
import os
import sys

TRITON_VERSIONS = ("3.8", "3.9")
"""Versions of Triton on which this file was tested."""


def why_not():
    """Return why kernels cannot be interpreted here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    version = importlib.metadata.version("triton")
    if not version.startswith(TRITON_VERSIONS):
        return f"triton {version}: the interpreter is mended for {' and '.join(TRITON_VERSIONS)} only"
    return None


def install():
    """Patch the interpreter, then import FLA's modules and patch them."""
    assert os.environ.get("TRITON_INTERPRET") == "1", "start the process with TRITON_INTERPRET=1"
    os.environ["FLA_CACHE_RESULTS"] = "0"  # FLA's file of autotuned configurations is named by the GPU
    take_the_first_configuration()
    compute_bfloat16_in_float32()
    allow_products_in_bfloat16_parts()

    import fla.modules.causal_conv1d
    import fla.ops.gated_delta_rule
    import fla.ops.kda  # noqa: F401

    let_loop_variables_be_cast()
    find_gather_where_it_is_interpreted()


def take_the_first_configuration():
    """Autotuning times kernels with the driver of a GPU. Equal times make it take the first configuration."""
    from triton.runtime.autotuner import Autotuner

    Autotuner._bench = lambda self, *args, config, **meta: [0.0, 0.0, 0.0]


def let_loop_variables_be_cast():
    """Kernels say `i.to(tl.int64)` of a loop's variable, a plain `int` in the interpreter."""

    class Scalar(int):
        def to(self, dtype):
            return self

    def scalars(*bounds):
        return map(Scalar, builtins.range(*map(int, bounds)))

    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and hasattr(module, "tl"):
            module.range = scalars


def find_gather_where_it_is_interpreted():
    """Triton interprets what kernels call as `tl.name`; FLA's modules say `gather = tl.gather`."""
    import triton.language as tl

    gather = tl.gather
    for name, module in list(sys.modules.items()):
        if name.startswith("fla.") and getattr(module, "gather", None) is gather:
            module.gather = lambda source, index, axis: tl.gather(source, index, axis)


def allow_products_in_bfloat16_parts():
    """FLA asks for float32 products as sums of three in bfloat16; the interpreter computes all in float32."""
    from triton.runtime.interpreter import InterpreterOptions, interpreter_builder

    known = InterpreterOptions().allowed_dot_input_precisions
    interpreter_builder.options = InterpreterOptions(allowed_dot_input_precisions=(*known, "bf16x3"))


def compute_bfloat16_in_float32():
    """The interpreter keeps bfloat16 as the 16 bits and computes with them as with integers, silently.

    Here operands become float32 and results are rounded to the nearest bfloat16, as a GPU does.
    """
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, ReduceOps, TensorHandle

    def widened(handle):
        if handle.dtype.scalar != tl.bfloat16:
            return handle
        return TensorHandle(_float32(handle.data), tl.float32)

    def computed_wide(operation, operands):
        def compute(self, *args):
            result = operation(self, *map(widened, args[:operands]), *args[operands:])
            if args[0].dtype.scalar == tl.bfloat16 and result.data.dtype == "float32":  # not a comparison
                return TensorHandle(_bfloat16(result.data), tl.bfloat16)
            return result

        return compute

    def cast(self, source, to, *rounding):
        if to.scalar != tl.bfloat16:
            return plain_cast(self, widened(source), to)
        wide = plain_cast(self, widened(source), tl.float32)
        return TensorHandle(_bfloat16(wide.data), tl.bfloat16)

    def total(self, x):
        return plain_sum(self, x.to(tl.float32)).to(x.dtype) if x.dtype == tl.bfloat16 else plain_sum(self, x)

    dot, plain_cast, plain_sum = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl, ReduceOps.sum
    InterpreterBuilder.create_dot = lambda self, a, b, *rest: dot(self, widened(a), widened(b), *rest)
    InterpreterBuilder.binary_op = computed_wide(InterpreterBuilder.binary_op, 2)
    InterpreterBuilder.unary_op = computed_wide(InterpreterBuilder.unary_op, 1)
    InterpreterBuilder.cast_impl = cast
    ReduceOps.sum = total


def _float32(bits):
    import numpy as np

    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bfloat16(x):
    """Return the bits of the nearest bfloat16, ties to even."""
    import torch

    return torch.from_numpy(x.copy()).bfloat16().view(torch.uint16).numpy()
