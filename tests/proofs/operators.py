"""The public operators of all lessons: what they take, their results in float64, the errors allowed.

To prove a new operator, add it to OPERATORS.
"""

import math
from unittest import mock

import torch
import triton
from cases import Operator, anything, contiguous

FLOATS = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
INTS = [torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8]
ANY = [*FLOATS, *INTS, torch.bool, torch.complex64]
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def alike(*names):
    """All inputs and the output have one shape and dtype."""
    return lambda sizes, dtype, options: dict.fromkeys((*names, "out"), (sizes, dtype))


def work(tensor):
    """The epsilon of the arithmetic: FP32, for float64 FP64."""
    return 2**-52 if tensor.dtype == torch.float64 else 2**-23


def finite_size(tensor):
    """Absolute values without infinities and NaN."""
    return tensor.double().abs().nan_to_num(0, 0, 0)


def aligned_size(tensor):
    """Absolute values, as Tensor Cores align them to add them up: by exponent fields.

    A subnormal number has the field of the smallest normal one, and loses as many digits.
    """
    size = finite_size(tensor)
    least = torch.finfo(tensor.dtype).tiny if tensor.itemsize == 2 else 0
    return torch.where(size > 0, size.clamp(min=least), 0)


def unless_overflow(allowed, size, tensor):
    """Anything goes where a partial sum of this size may pass the largest number."""
    largest = torch.finfo(torch.float64 if tensor.dtype == torch.float64 else F32).max
    return torch.where(size >= largest / 2, math.inf, allowed)


# Element by element


def twice(kernel):
    """A launch of the kernel, for a lesson that has no wrapper."""

    def run(lesson):
        def launch(x, out):
            out = torch.empty_like(x) if out is None else out
            block = 2048 // x.itemsize
            if n := x.numel():
                getattr(lesson, kernel)[(triton.cdiv(n, block),)](x, out, n, block)
            return out

        return launch

    return run


def multiple_of(times):
    """The length of the vectors."""
    return lambda sizes, dtype, options: dict.fromkeys(("x", "out"), ((times * sizes[0],), dtype))


def doubled(inputs, options):
    return 2 * inputs["x"].double()


def run_window(lesson):
    """Both masks of one length."""

    def window(x, out):
        out = torch.empty_like(x) if out is None else out
        lesson.window_kernel[(1,)](x, out, len(x), len(x))
        return out

    return window


def run_summary(lesson):
    def summarize(x, other, out):
        out = x.new_empty(3) if out is None else out
        lesson.summary_kernel[(1,)](x, out, len(x), other, 1024)
        return out

    return summarize


def summary(inputs, options):
    """Sum and maximum with what stands for missing numbers; softmax of the others."""
    x = inputs["x"].double()
    block = torch.cat([x, x.new_full((1024 - len(x),), options["other"])])
    share = torch.softmax(block, 0)[: len(x)].sum()
    return torch.stack([block.sum(), block.amax(), share])


def run_receive(lesson):
    def receive(x, out):
        out = torch.empty_like(x) if out is None else out
        block = triton.next_power_of_2(max(1, len(x)))
        lesson.receive_kernel[(1,)](x, out, len(x), BLOCK=block, SHOW=False)
        return out

    return receive


def scale_bias_allowed(inputs, exact, options):
    x = inputs["x"]
    return 4 * work(x) * (finite_size(x.double() * options["scale"]) + abs(options["bias"]))


def swiglu(inputs, options):
    gate, up = (t.double() for t in inputs.values())
    return gate / (1 + torch.exp(-gate)) * up


def swiglu_allowed(inputs, exact, options):
    """exp(-gate) has an error of |gate| roundings, and no value near its end."""
    gate, up = (t.double() for t in inputs.values())
    end, least = (-700, 2**-1000) if inputs["up"].dtype == torch.float64 else (-80, 2**-118)
    relative = work(inputs["up"]) * (8 + 2 * gate.abs().clamp(max=1000))
    allowed = finite_size(exact) * relative + least * finite_size(up)
    vanishes = (gate < end) | (gate.abs() < least)  # then 0 * inf is NaN
    return torch.where(vanishes & up.isinf(), math.inf, allowed)


def gelu(inputs, options):
    x = inputs["x"].double()
    if options["approximate"] == "none":
        return x * torch.special.ndtr(x)
    return x * (0.5 + 0.5 * torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


def gelu_allowed(inputs, exact, options):
    x = inputs["x"]
    if options["approximate"] == "none" and x.itemsize == 2:
        return finite_size(exact) * torch.finfo(x.dtype).eps / 32 + 2**-20
    return 16 * work(x) * (finite_size(exact) + finite_size(x).clamp(max=16))


def chain(factor):
    """k steps ``x -> factor * x + (1 - factor)`` in closed form."""

    def exact(inputs, options):
        power = factor ** options["k"]
        return power * inputs["x"].double() + (1 - power)

    return exact


def chain_allowed(inputs, exact, options):
    return options["k"] * 2**-22 * finite_size(inputs["x"]).clamp(min=1)


def run_fma(lesson):
    def fma(x, k, out):
        out = torch.empty_like(x) if out is None else out
        lesson.fma(x, out, k)
        return out

    return fma


def owners(lesson):
    """The wrapper makes no tensor of its own."""
    return lambda like, block_size, out: lesson.owners(
        torch.empty_like(like) if out is None else out, block_size
    )


def run_add(lesson):
    """The kernel of a lesson that has no wrapper for it."""

    def add(x, y, out):
        out = torch.empty_like(x) if out is None else out
        lesson.add_kernel[(triton.cdiv(len(x), 512),)](x, y, out, len(x), 512)
        return out

    return add


def run_configured_add(lesson):
    """One configuration, below the tuner; of x, every other element or so."""

    def add(x, y, step, config, out):
        out = torch.empty_like(y) if out is None else out
        chosen = lesson.ADD_SPACE[config].all_kwargs()
        lesson.add(lesson.add_kernel.fn, x[::step], y, out, **chosen)
        return out

    return add


def every_other(sizes, dtype, options):
    return {"x": ((options["step"] * sizes[0],), dtype)} | dict.fromkeys(
        ("y", "out"), (sizes, dtype)
    )


# Rows and columns


def transposed(sizes, dtype, options):
    return {"x": (sizes, dtype), "out": (sizes[::-1], dtype)}


def with_bias(sizes, dtype, options):
    return {"x": (sizes, dtype), "bias": (sizes[1:], dtype), "out": (sizes, dtype)}


def added(inputs, options):
    first, second = inputs.values()
    return first.double() + second.double()


def reduced(sizes, dtype, options):
    whole = options["op"] == "sum" and not dtype.is_floating_point
    kept = sizes[1 - options["dim"] % 2]
    return {"x": (sizes, dtype), "out": ((kept,), torch.int64 if whole else dtype)}


def sums(inputs, options):
    x = inputs["x"]
    return x.double().sum(options["dim"]) if x.is_floating_point() else x.sum(options["dim"])


def sums_allowed(inputs, exact, options):
    """Errors cancel, unless all numbers are one and NumPy adds them one by one."""
    x, dim = inputs["x"], options["dim"]
    size = finite_size(x).sum(dim)
    steps = 32 + (x.size(dim) / 2 if x.stride(dim) == 0 else 0)
    return unless_overflow(steps * work(x) * size, size, x)


def maximum_of_nothing(inputs, out, options):
    empty = options["op"] == "max" and inputs["x"].size(options["dim"]) == 0
    return IndexError if empty else None


def maximum(inputs, options):
    return inputs["x"].amax(options["dim"])


def maximum_allowed(inputs, exact, options):
    """None; but 0 may stand for -0."""
    return torch.zeros_like(exact, dtype=torch.float64)


def run_few(lesson):
    """Each program takes many steps, as with large tensors on a GPU."""

    def reduce(op, x, dim, out):
        with mock.patch.object(lesson, "PROGRAMS", (1, 1)):
            return lesson.reduce(op, x, dim, out)

    return reduce


def softmax(inputs, options):
    return torch.softmax(inputs["x"].double(), 1)


def softmax_allowed(inputs, exact, options):
    """An error of the exponent and of a few operations."""
    x = inputs["x"].double()
    if x.numel() == 0:
        return exact
    shift = (x - x.amax(1, keepdim=True)).clamp(-200, 0).nan_to_num(-200)
    tiny = torch.finfo(F32 if inputs["x"].dtype != torch.float64 else torch.float64).tiny
    return exact * work(inputs["x"]) * (64 - shift) + 2 * tiny


def run_online(lesson):
    """Rows of any length take the kernel for long ones."""

    def online(x, out):
        with mock.patch.object(lesson, "LONGEST", 0):
            return lesson.softmax(x, out)

    return online


def long_rows(sizes, dtype, options):
    """Of one step, or of more."""
    shape = 2, options["_more"] + sizes[0]
    return dict.fromkeys(("x", "out"), (shape, dtype))


def columns(inputs):
    """Random integers as targets: most in the row, some ignored, some outside."""
    N = inputs["x"].shape[1]
    target = inputs["target"] % (N + 3)
    return torch.where(target == N + 2, -100, target - 1)


def run_losses(lesson):
    def losses(x, target, out):
        return lesson.cross_entropy(x, columns(dict(x=x, target=target)), out)

    return losses


def logits(sizes, dtype, options):
    wide = torch.promote_types(dtype, F32)
    return {"x": (sizes, dtype), "target": (sizes[:1], torch.int64), "out": (sizes[:1], wide)}


def losses(inputs, options):
    x, target = inputs["x"].double(), columns(inputs)
    known = (target >= 0) & (target < x.shape[1])
    exact = torch.full_like(target, math.nan, dtype=torch.float64)
    if known.any():
        exact[known] = torch.nn.functional.cross_entropy(x[known], target[known], reduction="none")
    return torch.where(target == -100, 0, exact)


def losses_allowed(inputs, exact, options):
    return work(inputs["x"]) * (64 + 2 * finite_size(exact))


def run_naive(lesson):
    """One row in one program."""

    def naive(x, out):
        out = torch.empty_like(x) if out is None else out
        if n := len(x):
            lesson.naive_kernel[(1,)](x, out, n, triton.next_power_of_2(n))
        return out

    return naive


def naive_allowed(inputs, exact, options):
    """Without a shift the exponentials may overflow."""
    allowed = exact * 2**-23 * (64 + finite_size(inputs["x"]))
    return unless_overflow(allowed, inputs["x"].double().exp().sum(), inputs["x"])


def run_address(lesson):
    """The addresses of at most 8 x 8 elements."""

    def address(x, out):
        out = torch.empty(x.shape, dtype=torch.int64, device=x.device)
        lesson.address_kernel[(1,)](x, out, *x.shape, *x.stride())
        return out

    return address


def address(inputs, options):
    x = inputs["x"]
    i, j = (torch.arange(n, device=x.device) for n in x.shape)
    return x.data_ptr() + x.itemsize * (i[:, None] * x.stride(0) + j * x.stride(1))


def small_square(sizes, dtype, options):
    shape = tuple(min(n, 8) for n in sizes)
    return {"x": (shape, dtype), "out": (shape, torch.int64)}


def normed(sizes, dtype, options):
    tensors = {"x": (sizes, dtype), "out": (sizes, dtype)}
    for name in ("weight", "bias"):
        if kind := options[f"_{name}"]:
            tensors[name] = (sizes[-1:], torch.float32 if kind == "float32" else dtype)
    return tensors


def norm(center):
    def exact(inputs, options):
        x = inputs["x"].double()
        for _ in range(2 * center):  # as the first mean is rounded
            x = x - x.mean(-1, keepdim=True)
        y = x / (x.square().mean(-1, keepdim=True) + options["eps"]).sqrt()
        y = y * inputs["weight"].double() if "weight" in inputs else y
        return y + inputs["bias"].double() if "bias" in inputs else y

    return exact


def norm_allowed(center):
    def allowed(inputs, exact, options):
        """A little of the largest result of the row, and of what is added to it."""
        x = inputs["x"]
        if x.numel() == 0:
            return exact
        weight = finite_size(inputs.get("weight", x.new_ones(1)))
        largest = finite_size(exact).amax(-1, keepdim=True) + weight.amax() + 1
        if "bias" in inputs:
            largest = largest + finite_size(inputs["bias"]).amax()
        size = finite_size(x)
        limit = 16 * work(x) * largest + 0 * size
        if center:  # what is left of a large mean that is subtracted twice
            var = x.double().nan_to_num(0, 0, 0).var(-1, keepdim=True, correction=0)
            left = work(x) ** 2 * size.amax(-1, keepdim=True)
            limit = limit + 64 * left / (var + options["eps"]).sqrt() * weight
        if "weight" in inputs:
            limit = torch.where(inputs["weight"].isinf(), math.inf, limit)  # a zero makes it NaN
        # No normalised number is above the root of N.
        limit = unless_overflow(limit, weight * x.shape[-1] ** 0.5, x)
        return unless_overflow(limit, size.square().sum(-1, keepdim=True), x)

    return allowed


def norm_refusal(inputs, out, options):
    """Rows need one distance; parameters are contiguous; out may be x alone."""
    x = inputs["x"]
    if any(not t.is_contiguous() for name, t in inputs.items() if name != "x"):
        return ValueError
    for t in (x, out):
        if t is None or x.numel() == 0:
            continue
        axes = [axis for axis in range(t.dim() - 1) if t.size(axis) > 1]
        for outer, inner in zip(axes, axes[1:]):
            if t.stride(outer) != t.stride(inner) * t.size(inner):
                return ValueError
    return None


def autograd_refusal(inputs, out, options):
    """Rows fit one block; parameters are cloned, the result is new."""
    if inputs["x"].shape[-1] > 2**14:
        return ValueError
    return norm_refusal({"x": inputs["x"]}, None, options)


def normed_wide(sizes, dtype, options):
    """Rows that are not kept in registers."""
    return normed((2, 2**14 + sizes[0]), dtype, options)


NORM = dict(
    forms=50,
    mostly_plain=("weight", "bias"),
    options={
        "_weight": ["", "same", "float32"],
        "_bias": ["", "same", "float32"],
        "eps": [1e-5, 1e-6, 0.5],
    },
    refusal=norm_refusal,
)


def product(sizes, dtype, options):
    M, N, K = sizes
    out = options.get("out_dtype") or (F32 if dtype.itemsize == 1 else dtype)
    return {"a": ((M, K), dtype), "b": ((K, N), dtype), "out": ((M, N), out)}


def large_product(sizes, dtype, options):
    """Enough tiles for a GPU to take the large ones, and distances of a multiple of 16 bytes."""
    M, N, K = sizes
    return product((1024 + M, 2048 + 8 * N, 8 * K), dtype, options)


def gemm(inputs, options):
    return inputs["a"].double() @ inputs["b"].double()


LOSS = {"ieee": 0, "tf32x3": 2**-18, "tf32": 2**-9}  # of the sum of absolute products


def gemm_allowed(inputs, exact, options):
    a, b = inputs.values()
    size = aligned_size(a) @ aligned_size(b)
    loss = LOSS[options.get("input_precision", "ieee")] if a.itemsize > 1 else 2**-9
    return unless_overflow(size * (a.shape[1] * 2**-23 + loss) + a.shape[1] * 2**-149, size, a)


def gemm_refusal(inputs, out, options):
    a, b = inputs.values()
    return ValueError if (out is a or out is b) and out.numel() else None


GEMM = dict(
    exact=gemm,
    allowed=gemm_allowed,
    ranks=(3,),
    most=2**14,
    longest=200,
    forms=50,
    outs=("new", "window", "a", "b"),
    refusal=gemm_refusal,
)


def wide_product(sizes, dtype, options):
    """Distances of a multiple of 16 bytes."""
    M, N, K = sizes
    return product((M, 8 * N, 8 * K), dtype, options)


def run_configured_gemm(lesson):
    """The wrapper, and a tuner with one configuration to choose from, of those that fit."""

    def gemm(a, b, config, out):
        usable = lesson.fitting(lesson.SPACE, {"a_ptr": a}) if a.is_cuda else lesson.SPACE
        one = triton.autotune([usable[config % len(usable)]], lesson.KEY)
        with mock.patch.object(lesson, "gemm_kernel", one(lesson.gemm_kernel.fn)):
            return lesson.gemm(a, b)

    return gemm


def layer(shapes):
    """Inputs of a layer, from those of a product."""

    def tensors(sizes, dtype, options):
        x, b, out = shapes(sizes, dtype, options).values()
        found = {"x": x, "weight": (b[0][::-1], dtype), "out": out}
        if options["_bias"]:
            found["bias"] = (out[0][1:], dtype)
        return found | ({"residual": out} if options["_residual"] else {})

    return tensors


ACTIVATIONS = {
    None: lambda y: y,
    "relu": torch.relu,
    "silu": lambda y: y / (1 + torch.exp(-y)),
    "gelu_tanh": lambda y: gelu({"x": y}, {"approximate": "tanh"}),
}


def linear(inputs, options):
    y = inputs["x"].double() @ inputs["weight"].double().t()
    y = y + inputs["bias"].double() if "bias" in inputs else y
    y = ACTIVATIONS[options["activation"]](y)
    return y + inputs["residual"].double() if "residual" in inputs else y


def linear_allowed(inputs, exact, options):
    """The error of the sum, little more by the slope of an activation, and that of an exponent."""
    x, K = inputs["x"], inputs["x"].shape[1]
    size = aligned_size(x) @ aligned_size(inputs["weight"]).t()
    size = size + finite_size(inputs["bias"]) if "bias" in inputs else size
    least = 2**-20 if options["activation"] in ("silu", "gelu_tanh") else K * 2**-149
    allowed = size * (K + 8) * 2**-23 * 1.2 + finite_size(exact) * 2**-20 + least
    if "residual" in inputs:
        allowed = allowed + finite_size(inputs["residual"]) * 2**-22
    return unless_overflow(allowed, size, x)


def linear_refusal(inputs, out, options):
    """out may be the residual, and no other input."""
    if out is not None and out.numel() and (out is inputs["x"] or out is inputs["weight"]):
        return ValueError


def run_few_layers(lesson):
    """Two programs, each with one large tile after the other."""

    def linear_act(**arguments):
        def pick(*of):
            return 128, 128, 64, 4, 2, 2, known(*of)[-1]

        known = lesson.pick_tile
        with mock.patch.object(lesson, "pick_tile", pick):
            return lesson.linear_act(**arguments)

    return linear_act


LAYER = dict(
    exact=linear,
    allowed=linear_allowed,
    ranks=(3,),
    most=2**14,
    longest=200,
    options={"activation": [*ACTIVATIONS], "_bias": [False, True], "_residual": [False, True]},
    forms=50,
    outs=("new", "window", "x", "weight", "residual", "residual"),
    refusal=linear_refusal,
)


def run_norm_gradients(lesson):
    """The output, or one of the gradients."""

    def norm(x, dy, weight, bias, center, what, out):
        leaves = [t.clone(memory_format=torch.contiguous_format) for t in (weight, bias)]
        leaves = [t.requires_grad_() for t in (x.detach(), *leaves)]
        result = lesson.layer_norm(*leaves, eps=0.1, center=center)
        found = result.detach(), *torch.autograd.grad(result, leaves, dy)
        return dict(zip(("out", "dx", "dw", "db"), found))[what]

    return norm


def with_gradients(sizes, dtype, options):
    row, kind = sizes[-1:], F32 if options["_full"] else dtype
    out = (row, kind) if options["what"] in ("dw", "db") else (sizes, dtype)
    return {"x": (sizes, dtype), "dy": (sizes, dtype)} | {
        "weight": (row, kind),
        "bias": (row, kind),
        "out": out,
    }


def norm_gradients(inputs, options):
    """One result in float64, and what its parts sum up to."""
    x, dy, w, b = (t.double() for t in inputs.values())
    mean = x.mean(-1, keepdim=True) if options["center"] else torch.zeros_like(x[..., :1])
    r = ((x - mean).square().mean(-1, keepdim=True) + 0.1).rsqrt()
    x_hat, g = (x - mean) * r, dy * w
    off = r * (x.abs() + mean.abs()) + 2 * x_hat.abs()  # of x_hat, in units of the last place
    over = g.mean(-1, keepdim=True) * options["center"]
    along = (g * x_hat).mean(-1, keepdim=True)
    size = g.abs() * (1 + off) + x_hat.abs() * (g.abs() * (1 + off)).mean(-1, keepdim=True)
    size = size + (off + 1) * (g.abs() * (1 + off)).mean(-1, keepdim=True) + over.abs()
    rows = tuple(range(x.dim() - 1))
    sums = {"dw": dy * x_hat, "db": dy}, {"dw": dy.abs() * (1 + off), "db": dy.abs()}
    sums = [{k: t.sum(rows) if rows else t for k, t in part.items()} for part in sums]
    exact = {"out": x_hat * w + b, "dx": r * (g - x_hat * along - over)} | sums[0]
    sizes = {"out": off * w.abs() + b.abs() + 1, "dx": r * size} | sums[1]
    return exact[options["what"]], sizes[options["what"]]


def queried(sizes, dtype, options):
    (heads, shared), (M, N) = options["_heads"], sizes
    q, k = (2, heads, M, options["_D"]), (2, shared, N, options["_D"])
    return {name: (shape, dtype) for name, shape in dict(q=q, k=k, v=k, out=q).items()}


def weights(q, k, causal, scale):
    """Scores and their softmax in float64; a row that sees no key has none."""
    s = q @ k.mT * scale
    hidden = torch.ones_like(s).triu(1 + k.shape[2] - q.shape[2]) > 0
    return s, s.masked_fill(hidden & causal, -math.inf).softmax(-1).nan_to_num(0)


def attention(inputs, options):
    """In float64, and how far it is off if weights are rounded."""
    q, k, v = (t.double() for t in inputs.values())
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    s, p = weights(q, k, options["causal"], options["scale"] or q.shape[3] ** -0.5)
    if not s.numel():
        return torch.zeros_like(q), torch.zeros_like(q)
    off = torch.finfo(inputs["q"].dtype).eps / 2 + 2**-20 * (1 + s.abs().amax(-1, keepdim=True))
    size = v.abs()
    return p @ v, off * (p @ size) + 2**-25 * size.sum(2, keepdim=True)  # of subnormal weights


def run_attention_backward(lesson):
    """The output, or one of the gradients."""

    def attention(q, k, v, do, causal, what, out):
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        result = lesson.attention(*leaves, causal=causal)
        found = result.detach(), *torch.autograd.grad(result, leaves, do)
        return dict(zip(("out", "dq", "dk", "dv"), found))[what]

    return attention


def attended(sizes, dtype, options):
    (heads, shared), (LQ, LK) = options["_heads"], sizes
    q, k = (2, heads, LQ, options["_D"]), (2, shared, LK, options["_D"])
    shapes = dict(q=q, k=k, v=k, do=q, out=k if options["what"] in ("dk", "dv") else q)
    return {name: (shape, dtype) for name, shape in shapes.items()}


def gradients(inputs, options):
    """One result in float64, and how far it is off if P, dS and the output are rounded."""
    eps = torch.finfo(inputs["q"].dtype).eps
    q, k, v, do = (inputs[name].double() for name in ("q", "k", "v", "do"))
    group, scale = q.shape[1] // k.shape[1], q.shape[3] ** -0.5
    keys, values = (t.repeat_interleave(group, 1) for t in (k, v))
    s, p = weights(q, keys, options["causal"], scale)
    if not s.numel():
        zero = torch.zeros_like(k if options["what"] in ("dk", "dv") else q)
        return zero, zero
    off = (2 * eps + 2**-20 * (1 + s.abs().amax(-1, keepdim=True))) * p  # of p
    dp, o = do @ values.mT, p @ values
    ds = p * (dp - (do * o).sum(-1, keepdim=True))
    mean = (do.abs() * (off @ values.abs() + eps * o.abs())).sum(-1, keepdim=True)
    ds_off = off * (dp.abs() + (p * dp.abs()).sum(-1, keepdim=True)) + p * mean + eps * ds.abs()
    ds_off += torch.finfo(inputs["q"].dtype).tiny * (inputs["q"].dtype == F16)

    def shared(t):
        return t.unflatten(1, (k.shape[1], group)).sum(2)

    return {
        "out": (o, off @ values.abs()),
        "dq": (scale * ds @ keys, scale * ds_off @ keys.abs()),
        "dk": (scale * shared(ds.mT @ q), scale * shared(ds_off.mT @ q.abs())),
        "dv": (shared(p.mT @ do), shared((off + 1e-7).mT @ do.abs())),
    }[options["what"]]


def same(inputs, options):
    [x] = inputs.values()
    return x


FLAT = dict(tensors=alike("x"), refusal=contiguous)
listed = [
    Operator("copy", "copy", ANY, exact=same, moves_bits=True, **FLAT),
    Operator(
        "copy",
        "fma",
        [F32],
        exact=chain(1 - 2**-12),
        allowed=chain_allowed,
        options={"k": [0, 1, 17]},
        ranks=(1,),
        plain=True,
        run=run_fma,
        **FLAT,
    ),
    Operator(
        "programs",
        "owners",
        [torch.int32],
        alike("like"),
        lambda inputs, options: (
            torch.arange(len(inputs["like"]), device=inputs["like"].device) // options["block_size"]
        ),
        ranks=(1,),
        most=500,
        options={"block_size": [1, 8, 128]},
        plain=True,
        run=owners,
    ),
    Operator(
        "vector_add",
        "vector_add",
        FLOATS,
        alike("x", "y"),
        added,
        outs=("new", "window", "x", "y"),
        refusal=contiguous,
    ),
    Operator(
        "measuring",
        "chain",
        [F32, F16],
        exact=chain(1 - 2**-10),
        allowed=chain_allowed,
        options={"k": [0, 1, 5], "block": [64, 1024]},
        **FLAT,
    ),
    Operator("strides_2d", "copy_2d", ANY, alike("x"), same, ranks=(2,), moves_bits=True),
    Operator(
        "strides_2d",
        "transpose",
        ANY,
        transposed,
        lambda inputs, options: inputs["x"].t(),
        ranks=(2,),
        moves_bits=True,
    ),
    Operator("strides_2d", "bias_add", FLOATS, with_bias, added, ranks=(2,)),
    Operator(
        "fused_elementwise",
        "scale_bias",
        FLOATS,
        exact=lambda inputs, options: inputs["x"].double() * options["scale"] + options["bias"],
        allowed=scale_bias_allowed,
        options={"scale": [1.1, 0, -3], "bias": [-0.3, 1e4]},
        **FLAT,
    ),
    Operator(
        "fused_elementwise",
        "swiglu",
        FLOATS,
        alike("gate", "up"),
        swiglu,
        swiglu_allowed,
        outs=("new", "window", "gate", "up"),
        refusal=contiguous,
    ),
    Operator(
        "fused_elementwise",
        "gelu",
        FLOATS,
        exact=gelu,
        allowed=gelu_allowed,
        options={"approximate": ["none", "tanh"]},
        **FLAT,
    ),
    Operator(
        "strides_2d",
        "address_kernel",
        [F32, F16],
        small_square,
        address,
        ranks=(2,),
        outs=("new",),
        run=run_address,
    ),
    Operator(
        "softmax",
        "naive_kernel",
        [F32],
        alike("x"),
        lambda inputs, options: torch.softmax(inputs["x"].double(), 0),
        naive_allowed,
        ranks=(1,),
        most=500,
        extremes=False,
        plain=True,
        run=run_naive,
    ),
    Operator(
        "softmax", "softmax", FLOATS, alike("x"), softmax, softmax_allowed, ranks=(2,), forms=50
    ),
    Operator(
        "softmax",
        "softmax",
        FLOATS,
        long_rows,
        softmax,
        softmax_allowed,
        ranks=(1,),
        options={"_more": [0, 16_384]},
        examples=15,
        run=run_online,
        title="online softmax",
    ),
    Operator(
        "llm_operators",
        "cross_entropy",
        FLOATS,
        logits,
        losses,
        losses_allowed,
        ranks=(2,),
        outs=("new", "window"),
        examples=40,
        forms=50,
        run=run_losses,
    ),
    Operator(
        "gemm",
        "gemm",
        [F32, F16, BF16],
        product,
        options={"out_dtype": [None, F32, F16, BF16], "input_precision": ["ieee"]},
        **GEMM,
    ),
    Operator(
        "gemm",
        "gemm",
        [F32],
        product,
        options={"out_dtype": [None], "input_precision": ["tf32", "tf32x3"]},
        extremes=False,
        title="gemm in TF32",
        **GEMM,
    ),
    Operator(
        "gemm",
        "gemm",
        [torch.float8_e4m3fn, torch.float8_e5m2],
        product,
        options={"out_dtype": [None, BF16], "input_precision": ["ieee"], "promote": [None, 128]},
        extremes=False,
        capability=(8, 9),
        title="gemm of 8 bits",
        **GEMM,
    ),
    Operator(
        "gemm",
        "gemm",
        [F32, F16, BF16],
        large_product,
        options={"out_dtype": [None], "input_precision": ["ieee", "tf32"]},
        extremes=False,
        plain=True,
        capability=(9, 0),
        title="gemm in large tiles",
        **GEMM,
    ),
    Operator("gemm_fast", "matmul", [F16, BF16], product, **GEMM),
    Operator(
        "gemm_fast",
        "matmul",
        [F16, BF16],
        wide_product,
        plain=True,
        examples=40,
        title="matmul by descriptors",
        **GEMM,
    ),
    Operator(
        "gemm_fast",
        "matmul",
        [F16, BF16],
        large_product,
        plain=True,
        capability=(9, 0),
        title="matmul in large tiles",
        **GEMM,
    ),
    Operator(
        "gemm_fast",
        "add_kernel",
        FLOATS,
        alike("x", "y"),
        added,
        ranks=(1,),
        plain=True,
        run=run_add,
    ),
    Operator("gemm_epilogue", "linear_act", [F16, BF16], layer(product), **LAYER),
    Operator(
        "gemm_epilogue",
        "linear_act",
        [F16, BF16],
        layer(wide_product),
        plain=True,
        examples=60,
        run=run_few_layers,
        title="linear_act in few programs",
        **LAYER,
    ),
    Operator(
        "gemm_epilogue",
        "linear_act",
        [F16, BF16],
        layer(large_product),
        plain=True,
        capability=(9, 0),
        title="linear_act in large tiles",
        **LAYER,
    ),
    Operator(
        "autotune",
        "gemm",
        [F16, BF16],
        product,
        options={"config": [*range(20)]},
        run=run_configured_gemm,
        **GEMM | {"outs": ("new",)},
    ),
    Operator(
        "autotune",
        "add",
        FLOATS,
        every_other,
        lambda inputs, options: inputs["x"][:: options["step"]].double() + inputs["y"].double(),
        ranks=(1,),
        options={"config": [0, 1, 2], "step": [1, 3]},
        plain=True,
        run=run_configured_add,
    ),
]
listed.append(
    Operator(
        "autograd",
        "layer_norm",
        FLOATS,
        with_gradients,
        lambda inputs, options: norm_gradients(inputs, options)[0],
        lambda inputs, exact, options: 16 * work(inputs["x"]) * norm_gradients(inputs, options)[1],
        ranks=(1, 2, 3),
        options={
            "center": [True, False],
            "what": ["out", "dx", "dw", "db"],
            "_full": [False, True],
        },
        outs=("new",),
        refusal=autograd_refusal,
        extremes=False,
        examples=50,
        forms=50,
        run=run_norm_gradients,
    )
)
listed.append(
    Operator(
        "attention",
        "attention",
        [F16, BF16],
        queried,
        lambda inputs, options: attention(inputs, options)[0],
        lambda inputs, exact, options: attention(inputs, options)[1],
        ranks=(2,),
        most=2**14,
        longest=300,
        options={
            "causal": [False, True],
            "scale": [None, 0.3, 2.0],
            "_heads": [(1, 1), (4, 2)],
            "_D": [1, 16, 40, 64, 72, 128, 256],
        },
        outs=("new", "window"),
        extremes=False,
        examples=50,
        forms=60,
    )
)
listed.append(
    Operator(
        "attention_backward",
        "attention",
        [F16, BF16],
        attended,
        lambda inputs, options: gradients(inputs, options)[0],
        lambda inputs, exact, options: gradients(inputs, options)[1] + 1e-6,
        ranks=(2,),
        most=2**14,
        longest=200,
        options={
            "what": ["out", "dq", "dk", "dv"],
            "causal": [False, True],
            "_heads": [(1, 1), (4, 2)],
            "_D": [16, 24, 64],
        },
        outs=("new",),
        extremes=False,
        forms=30,
        run=run_attention_backward,
    )
)
for title, exact, allowed, refusal in (
    ("sum", sums, sums_allowed, anything),
    ("max", maximum, maximum_allowed, maximum_of_nothing),
):
    promises = dict(
        dtypes=FLOATS + INTS + [torch.bool],
        tensors=reduced,
        exact=exact,
        allowed=allowed,
        ranks=(2,),
        options={"op": [title], "dim": [-2, -1, 0, 1]},
        refusal=refusal,
        outs=("new", "window"),
    )
    few = dict(title=f"{title} in few programs", run=run_few, most=2**15, longest=2**15)
    listed.append(Operator("reductions", "reduce", title=title, **promises))
    listed.append(Operator("reductions", "reduce", examples=40, **few, **promises))
for function, center in ("layer_norm", True), ("rms_norm", False):
    several = dict(dtypes=FLOATS, tensors=normed, ranks=(1, 2, 2, 3))
    wide = dict(dtypes=FLOATS, tensors=normed_wide, ranks=(1,), examples=10)
    wide["title"] = f"{function} of wide rows"
    for more in several, wide:
        exact = dict(exact=norm(center), allowed=norm_allowed(center))
        listed.append(Operator("norms", function, **exact, **more, **NORM))
for kernel, times in ("twice_kernel", 1), ("twice_full_kernel", 1), ("twice_promised_kernel", 16):
    vector = dict(dtypes=FLOATS, tensors=multiple_of(times), ranks=(1,), plain=True)
    listed.append(Operator("loads_and_masks", kernel, exact=doubled, run=twice(kernel), **vector))
listed += [
    Operator(
        "loads_and_masks",
        "window_kernel",
        [F32],
        lambda sizes, dtype, options: dict.fromkeys(("x", "out"), ((min(*sizes, 16),), dtype)),
        same,
        ranks=(1,),
        moves_bits=True,
        plain=True,
        run=run_window,
    ),
    Operator(
        "loads_and_masks",
        "summary_kernel",
        [F32],
        lambda sizes, dtype, options: {"x": ((min(*sizes, 1024),), dtype), "out": ((3,), dtype)},
        summary,
        lambda inputs, exact, options: 2**-18 * (1 + finite_size(inputs["x"]).sum()) + 0 * exact,
        ranks=(1,),
        options={"other": [0.0, -math.inf]},
        outs=("new", "window"),
        extremes=False,
        plain=True,
        run=run_summary,
    ),
    Operator(
        "programs",
        "receive_kernel",
        [F32],
        alike("x"),
        same,
        ranks=(1,),
        most=300,
        moves_bits=True,
        plain=True,
        run=run_receive,
    ),
]

OPERATORS = {operator.name: operator for operator in listed}
