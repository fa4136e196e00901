"""fused_elementwise: every promise of its docstrings, against float64, interpreted and on CUDA."""

import functools
import math
import re

import compile_only
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from refusals import assert_refused

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

DTYPES = [torch.float32, torch.float16, torch.float64, torch.bfloat16]
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson
SIZES = [0, 1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 509, 511, 512, 513]
SIZES += [997, 1003, 1008, 1023, 1024, 1025, 2047, 4093]
OWN = 24  # elements of the surroundings on each side
OPERATORS = ["scale_bias", "swiglu", "gelu", "gelu_tanh"]
ARITY = {"swiglu": 2}


def operator(lesson, op):
    """The function of the lesson, and the same in float64 by formulas of this file's own."""

    def normal_share(x):
        return torch.special.ndtr(x)

    def tanh_share(x):
        return 0.5 + 0.5 * torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x))

    return {
        "scale_bias": (
            functools.partial(lesson.scale_bias, scale=1.1, bias=-0.3),
            lambda x: x * 1.1 - 0.3,
        ),
        "swiglu": (lesson.swiglu, lambda gate, up: gate / (1 + torch.exp(-gate)) * up),
        "gelu": (lesson.gelu, lambda x: x * normal_share(x)),
        "gelu_tanh": (
            functools.partial(lesson.gelu, approximate="tanh"),
            lambda x: x * tanh_share(x),
        ),
    }[op]


def view(values, start=0):
    """The values as a view that begins ``start`` elements into a buffer of NaN."""
    n = values.numel()
    buffer = values.new_full((n + start + OWN,), math.nan)
    buffer[start : start + n] = values.reshape(-1)
    return buffer[start : start + n].view(values.shape)


def bits(tensor):
    """For comparison bit by bit. All NaN are one value."""
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return torch.where(tensor.isnan(), math.nan, tensor).view(integers)


def assert_close(got, exact, inputs):
    """One rounding to the dtype, and a few of the arithmetic in FP32 or FP64 before it.

    An exponential of v has an error of about |v| roundings, and 1 + erf(x) one of 2**-24.
    """
    limits = torch.finfo(got.dtype)
    wide = min(limits.eps, 2**-23)
    largest = max((t.abs().nan_to_num(0, 0, 0).max().item() for t in inputs), default=0)
    largest = min(max(largest, 1), 1000)
    rtol = limits.eps / 2 + 16 * wide
    allowed = rtol * exact.abs() + 16 * wide * largest + limits.smallest_normal * limits.eps
    if len(inputs) == 2 and got.dtype != torch.float64:
        # exp(88) is the last in FP32; PyTorch, too, has no silu(-89), whatever it is times up.
        gate, up = (t.double() for t in inputs)
        allowed += 2**-118 * up.abs()
        exact = torch.where((gate < -80) & up.isinf(), got.double(), exact)
    finite = exact.abs() < limits.max
    error = (got.double() - exact).abs()
    assert (error <= allowed)[finite].all(), (got, exact)
    # Beyond the largest number lies infinity, and where there is no number, NaN.
    assert torch.equal(got.isnan(), exact.isnan())
    huge = (exact.abs() > limits.max * (1 + limits.eps)) & ~exact.isnan()
    assert torch.equal(got[huge].double(), exact[huge].sign() * math.inf)


def assert_right(lesson, op, inputs, start=0):
    """Into a poisoned view, and nowhere else; the inputs stay as they are."""
    call, ref = operator(lesson, op)
    exact = ref(*(t.double() for t in inputs))
    before = [bits(t).clone() for t in inputs]
    x = inputs[0]
    n = x.numel()
    results = []
    for poison in (math.nan, 1.0):
        room = x.new_full((start + n + OWN,), poison)
        untouched = bits(room).clone()
        out = room[start : start + n].view(x.shape)
        assert call(*inputs, out=out) is out
        if n:
            assert_close(out, exact, inputs)
        after = bits(room)
        assert torch.equal(after[:start], untouched[:start])
        assert torch.equal(after[start + n :], untouched[start + n :])
        results.append(bits(out))
    fresh = call(*inputs)
    assert (fresh.shape, fresh.dtype, fresh.device) == (x.shape, x.dtype, x.device)
    assert torch.equal(bits(fresh), results[0]) and torch.equal(results[0], results[1])
    assert all(torch.equal(bits(t), b) for t, b in zip(inputs, before))


def normals(n, dtype, device, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, generator=generator, dtype=torch.float64).to(dtype).to(device)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_sizes(lesson, device, op, dtype):
    for n in SIZES:
        inputs = [view(normals(n, dtype, device, seed)) for seed in range(ARITY.get(op, 1))]
        assert_right(lesson, op, inputs, start=16)


@settings(max_examples=80, deadline=None)
@given(
    op=st.sampled_from(OPERATORS),
    shape=st.lists(st.integers(0, 12), max_size=3) | st.tuples(st.integers(0, 3000)),
    starts=st.tuples(*[st.integers(0, OWN)] * 3),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 99),
)
@example(op="swiglu", shape=(1003,), starts=(1, 0, 0), dtype=torch.float32, seed=0)
@example(op="gelu", shape=(1008,), starts=(0, 0, 3), dtype=torch.float16, seed=0)
@example(op="scale_bias", shape=(), starts=(0, 0, 0), dtype=torch.float32, seed=0)
def test_views_of_any_shape_that_start_anywhere(lesson, device, op, shape, starts, dtype, seed):
    n = math.prod(shape)
    inputs = [
        view(normals(n, dtype, device, seed + i).view(shape), starts[i])
        for i in range(ARITY.get(op, 1))
    ]
    assert_right(lesson, op, inputs, starts[2])


@settings(max_examples=120, deadline=None)
@given(data=st.data(), op=st.sampled_from(OPERATORS), dtype=st.sampled_from(DTYPES))
def test_special_values(lesson, device, data, op, dtype):
    """Infinities, NaN, both zeros, subnormals, large values of either sign."""
    limits = torch.finfo(dtype)
    special = [0.0, math.inf, math.nan, limits.max, limits.smallest_normal, 88.0, 89.0, 710.0]
    special += [limits.tiny * limits.eps, 1.0, 1 + limits.eps, 5.5, 13.0, 1e4, limits.max / 2]
    number = st.sampled_from(special + [-v for v in special]) | st.floats(-30, 30, width=32)
    rows = data.draw(
        st.lists(st.tuples(*[number] * ARITY.get(op, 1)), min_size=1, max_size=40), label="rows"
    )
    columns = torch.tensor(rows, dtype=torch.float64).to(dtype).T.contiguous().to(device)
    assert_right(lesson, op, list(columns))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", OPERATORS)
def test_each_special_value(lesson, device, op, dtype):
    """For certain, alone and in pairs: what may be drawn above, and the tails of GELU."""
    limits = torch.finfo(dtype)
    values = [0.0, 1.0, 1.5, 4.0, 5.5, 6.0, 8.0, 13.0, 14.0, 88.0, 89.0, 1e4, math.inf]
    values += [limits.max, limits.max / 2, limits.smallest_normal, limits.smallest_normal / 2]
    values = [*values, math.nan, *(-v for v in values)]
    grid = torch.cartesian_prod(*[torch.tensor(values, dtype=torch.float64)] * ARITY.get(op, 1))
    columns = grid.view(len(grid), -1).T.to(dtype).contiguous().to(device)
    assert_right(lesson, op, list(columns))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_gelu_is_right_for_every_number(lesson, device, dtype):
    """All 65,536 of them: at most one rounding and 1/32 of an epsilon from float64."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype)
    exact = x.double() * torch.special.ndtr(x.double())
    eps = torch.finfo(dtype).eps
    finite = x.isfinite()
    got = lesson.gelu(x.to(device)).cpu()
    close = dict(rtol=eps / 2 + eps / 32, atol=2**-20)
    torch.testing.assert_close(got[finite].double(), exact[finite], **close)
    assert (got[finite] == exact.to(dtype)[finite]).double().mean() > 0.99


@pytest.mark.parametrize("op", OPERATORS)
def test_zeros_keep_their_sign(lesson, device, op):
    zeros = torch.tensor([-0.0, 0.0], device=device)
    call, ref = operator(lesson, op)
    inputs = [zeros] * ARITY.get(op, 1)
    assert torch.equal(bits(call(*inputs)), bits(ref(*inputs)))


@pytest.mark.parametrize("scale, bias", [(0.1, 0.7), (3, -2), (1e-8, 1e8), (0, math.inf)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_keep_their_digits(lesson, device, dtype, scale, bias):
    """In float64 they are not rounded to FP32 on their way."""
    x = normals(1003, dtype, device)
    exact = x.double() * scale + bias
    got = lesson.scale_bias(x, scale, bias)
    eps = torch.finfo(dtype).eps
    close = dict(rtol=eps / 2 + min(eps, 2**-23), atol=4 * min(eps, 2**-23))
    exact = exact.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max).to(dtype).double()
    got = got.clamp(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    torch.testing.assert_close(got.double(), exact, **close)


def test_numbers_arrive_in_fp64(lesson):
    """The interpreter would keep their digits anyway; the compiler goes by what is declared."""
    from triton.runtime.jit import JITFunction

    params = JITFunction(lesson.scale_bias_kernel.fn).params
    declared = {param.name: param.annotation_type for param in params}
    assert (declared["scale"], declared["bias"]) == ("fp64", "fp64")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_narrow_results_are_rounded_once(lesson, device, dtype):
    x = normals(4096, dtype, device)
    assert torch.equal(lesson.scale_bias(x, 1.375, -0.625), (x.double() * 1.375 - 0.625).to(dtype))
    assert not torch.equal(x * 1.375 - 0.625, (x.double() * 1.375 - 0.625).to(dtype))


@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize("n", [1, 511, 1003, 2048])
def test_chain(lesson, device, n, k):
    x = view(normals(n, torch.float32, device))
    expected = x
    for _ in range(k):
        expected = expected * 0.75
    assert torch.equal(lesson.fused(lesson.chain_kernel, None, k, x=x), expected)
    room = x.new_full((n + OWN,), math.nan)
    lesson.fused(lesson.chain_kernel, room[:n], k, x=x)
    assert torch.equal(room[:n], expected) and room[n:].isnan().all()


@pytest.mark.parametrize("op", OPERATORS)
def test_in_place(lesson, device, op):
    call, _ = operator(lesson, op)
    for position in range(ARITY.get(op, 1)):
        inputs = [normals(1003, torch.float32, device, s) for s in range(ARITY.get(op, 1))]
        expected = call(*inputs)
        assert call(*inputs, out=inputs[position]) is inputs[position]
        assert torch.equal(inputs[position], expected)
    x = normals(1003, torch.float32, device)
    expected = call(*[x.clone()] * ARITY.get(op, 1))
    assert torch.equal(call(*[x] * ARITY.get(op, 1), out=x), expected)


def test_autograd_sees_the_write(lesson, device):
    w = torch.ones(3, device=device, requires_grad=True)
    b = torch.ones(3, device=device)
    loss = (w * b).sum()
    lesson.scale_bias(b.clone(), 2, 1, out=b)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_neighbours_in_one_buffer(lesson, device):
    gate, up, out = normals(3 * 1003, torch.float32, device).view(3, 1003)
    expected = lesson.swiglu(gate.clone(), up.clone())
    assert torch.equal(lesson.swiglu(gate, up, out=out), expected)


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    x = torch.ones(5, device=device, requires_grad=True)
    with torch.no_grad():
        assert not lesson.scale_bias(x, 2, 1).requires_grad
        assert torch.equal(lesson.scale_bias(x, 2, 1, out=x), torch.full_like(x, 3))
    with torch.inference_mode():
        assert lesson.scale_bias(x, 2, 1).sum().item() == 35
    assert torch.equal(lesson.scale_bias(x.detach(), 1, 1), x.detach() + 1)


def refusals(x):
    """Arguments of swiglu, and what must be said, for a 17 × 59 float32 tensor."""
    leaf = x.clone().requires_grad_()
    flat, meta = x.reshape(-1), x.to("meta")
    yield (x.tolist(), x), TypeError, "gate is list, not a tensor"
    yield (None, None), TypeError, "gate is NoneType, not a tensor"
    yield (x, 1.0), TypeError, "up is float, not a tensor"
    yield (x, x, [0.0]), TypeError, "out is list, not a tensor"
    for dtype in (torch.int32, torch.int64, torch.bool, torch.complex64, torch.uint8):
        yield (x.to(dtype), x.to(dtype)), TypeError, f"gate is {dtype}, not a tensor of"
    yield (x, x.int()), TypeError, "up is torch.int32, not a tensor of"
    yield (x, x.double()), ValueError, "up is torch.float64 torch.Size([17, 59]) "
    yield (x, x, x.half()), ValueError, "out is torch.float16 torch.Size([17, 59]) "
    yield (x, x[0]), ValueError, "up is torch.float32 torch.Size([59]) "
    yield (x, x[:1]), ValueError, "up is torch.float32 torch.Size([1, 59]) "
    yield (x, x, x[:16]), ValueError, "out is torch.float32 torch.Size([16, 59]) "
    yield (x[:0], x[:0], x), ValueError, "out is torch.float32 torch.Size([17, 59]) "
    yield (x, meta), ValueError, "up is torch.float32 torch.Size([17, 59]) meta: mixed"
    yield (x, x, meta), ValueError, "out is torch.float32 torch.Size([17, 59]) meta: mixed"
    yield (meta, meta), ValueError, "gate is on meta; kernels run on cuda"
    yield (x.t(), x.t()), ValueError, "gate is sparse, negated or not contiguous"
    yield (x[:, :58], x[:, 1:]), ValueError, "gate is sparse, negated or not contiguous"
    yield (flat[:1000:2], flat[500:1000]), ValueError, "gate is sparse, negated or not contiguous"
    yield (x, x[:1].expand(17, 59)), ValueError, "up is sparse, negated or not contiguous"
    yield (x, x, x[:, :1].expand(17, 59)), ValueError, "out is sparse, negated or not contiguous"
    yield (x.to_sparse(), x), ValueError, "gate is sparse, negated or not contiguous"
    yield (x.to_sparse_csr(), x), ValueError, "gate is sparse, negated or not contiguous"
    yield (torch._neg_view(x), x), ValueError, "gate is sparse, negated or not contiguous"
    yield (x, x, torch._neg_view(x)), ValueError, "out is sparse, negated or not contiguous"
    yield (leaf, x), ValueError, "gate requires a gradient"
    yield (x, leaf), ValueError, "up requires a gradient"
    yield (x, x, leaf), ValueError, "out requires a gradient"
    yield (flat[:500], flat[500:1000], flat[1:501]), ValueError, "out overlaps gate in part"
    yield (flat[1:501], flat[500:1000], flat[:500]), ValueError, "out overlaps gate in part"
    yield (flat[:500], flat[500:1000], flat[501:1001]), ValueError, "out overlaps up in part"


def test_refusals(lesson, device):
    x = normals(1003, torch.float32, device).view(17, 59)
    for arguments, error, message in refusals(x):
        assert_refused(lesson.swiglu, arguments, error, message, x)


def test_other_arguments_are_refused(lesson, device):
    x = torch.ones(3, device=device)
    for approximate in ("exact", None, 1, "Tanh"):
        with pytest.raises(ValueError, match="approximate=.*: not 'none' or 'tanh'"):
            lesson.gelu(x, approximate)
    for wrong, error in [(None, TypeError), ("two", ValueError), ([1.0], TypeError)]:
        with pytest.raises(error):
            lesson.scale_bias(x, wrong, 1)
        with pytest.raises(error):
            lesson.scale_bias(x, 1, wrong)
    with pytest.raises(TypeError, match="x is list"):
        lesson.gelu([1.0])
    with pytest.raises(ValueError, match="out overlaps x in part"):
        lesson.scale_bias(x[:2], 1, 1, out=x[1:])


def test_offsets_are_64_bits_wide():
    """From the start: a product of 32 bits would wrap before it is widened."""
    pointers = dict.fromkeys(("x_ptr", "gate_ptr", "up_ptr", "out_ptr"), "*fp32:16")
    arguments = pointers | {"n": "i64:16", "scale": "fp64", "bias": "fp64"}
    constants = {"scale_bias": {}, "swiglu": {}, "gelu": {"TANH": False}, "chain": {"K": 1}}
    jobs = [
        compile_only.Job(
            "fused_elementwise", f"{name}_kernel", "sm_90", arguments, {"BLOCK": 1024} | more
        )
        for name, more in constants.items()
    ]
    for job, report in zip(jobs, compile_only.compile_kernels(jobs)):
        products = re.findall(r"arith\.muli .*: (?:tensor<.*?x)?(i\d+)", report.asm["ttgir"])
        assert products and set(products) == {"i64"}, job.kernel


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
def test_devices_on_cuda(lesson, device):
    x = torch.ones(1003, device=device)
    for arguments, message in [
        ((x.cpu(), x.cpu()), "gate is on cpu; kernels run on cuda"),
        ((x, x.cpu()), "up is torch.float32 torch.Size([1003]) cpu: mixed"),
    ]:
        with pytest.raises(ValueError) as caught:
            lesson.swiglu(*arguments)
        assert str(caught.value).startswith(message)
    if torch.cuda.device_count() > 1:
        other = x.to("cuda:1")
        assert torch.equal(lesson.scale_bias(other, 2, 1), other * 3)
        with pytest.raises(ValueError, match="cuda:1: mixed"):
            lesson.swiglu(x, other)
    assert torch.cuda.current_device() == 0


@pytest.mark.gpu
@on_cuda
def test_contraction_is_the_whole_difference_on_cuda(lesson, device):
    """Without it, each bit is PyTorch's; with it, the result is rounded once."""
    x = normals(2**20, torch.float32, device)
    out = torch.full_like(x, math.nan)
    for contract in (True, False):
        lesson.scale_bias_kernel[(2**10,)](
            x, out, 2**20, 1.375, -0.625, 1024, enable_fp_fusion=contract
        )
        exact = (x.double() * 1.375 - 0.625).float()
        assert torch.equal(out, exact if contract else x * 1.375 + -0.625)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("n", [2**31 - 1, 2**31 + 3])
def test_long_vectors_on_cuda(lesson, device, n):
    """Offsets beyond 32 bits are right, to the last element."""
    if torch.cuda.mem_get_info()[0] < 10 * n:
        pytest.skip(f"{10 * n / 2**30:.0f} GiB of GPU memory are needed")
    x = torch.randn(n, dtype=torch.float16, device=device)
    out = torch.full_like(x, math.nan)
    lesson.scale_bias(x, 1.375, -0.625, out=out)
    for o, a in zip(*(t.split(2**26) for t in (out, x))):
        assert torch.equal(o, (a.double() * 1.375 - 0.625).half())
    lesson.swiglu(x, x, out=out)
    for o, a in zip(*(t[-(2**26) :].split(2**24) for t in (out, x))):
        exact = torch.nn.functional.silu(a.double()) * a.double()
        torch.testing.assert_close(o.double(), exact, rtol=2**-10, atol=2**-20)
