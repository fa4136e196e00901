"""bfloat16 in kernels: float32 rounded to nearest even, in the interpreter as on a GPU."""

import pytest

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

N = 16


@triton.jit
def elementwise_kernel(x_ptr, y_ptr, out_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(out_ptr + offs, x + y)
    tl.store(out_ptr + N + offs, x * y)
    tl.store(out_ptr + 2 * N + offs, tl.maximum(x, y))
    tl.store(out_ptr + 3 * N + offs, tl.where(x < y, -x, tl.abs(y)))
    tl.store(out_ptr + 4 * N + offs, (x.to(tl.float32) / 3).to(tl.bfloat16))


@triton.jit
def block_kernel(x_ptr, y_ptr, product_ptr, sums_ptr, scan_ptr, top_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x, y = tl.load(x_ptr + offs), tl.load(y_ptr + offs)
    tl.store(product_ptr + offs, tl.dot(x, y))
    tl.store(sums_ptr + tl.arange(0, N), tl.sum(x, axis=1).to(tl.float32))
    tl.store(scan_ptr + offs, tl.cumsum(tl.where(x > 0, x, 0.0), axis=1).to(tl.float32))
    tl.store(top_ptr, tl.max(tl.max(x, axis=1), axis=0))


def normals(*shape, device):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator).bfloat16().to(device)


def test_elementwise(device):
    x, y = normals(2, N, device=device)
    out = torch.empty(5, N, dtype=torch.bfloat16, device=device)
    elementwise_kernel[(1,)](x, y, out, N)
    selected = torch.where(x < y, -x, y.abs())
    third = (x.float() / 3).bfloat16()
    expected = torch.stack([x + y, x * y, torch.maximum(x, y), selected, third])
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_dot_and_reductions(device):
    x, y = normals(2, N, N, device=device)
    product, scan = torch.empty(2, N, N, device=device)
    sums, top = torch.empty(N, device=device), torch.empty(1, dtype=x.dtype, device=device)
    block_kernel[(1,)](x, y, product, sums, scan, top, N)
    torch.testing.assert_close(product, x.float() @ y.float())
    # How often a sum is rounded to bfloat16 on its way is not promised.
    torch.testing.assert_close(sums, x.float().sum(1), rtol=2**-5, atol=2**-5)
    torch.testing.assert_close(scan, x.float().clamp(min=0).cumsum(1), rtol=2**-5, atol=2**-5)
    assert top.item() == x.max().item()


@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 3.39e38, float("inf"), float("nan"), 1 / 3])
def test_rounding_is_that_of_torch(value):
    import numpy as np
    from interpreter_bf16 import round_to_bf16

    for near in np.nextafter(np.float32(value), np.float32([-np.inf, value, np.inf])):
        got = torch.from_numpy(round_to_bf16([near]).astype(np.int16)).view(torch.bfloat16)
        expected = torch.tensor([near]).bfloat16()
        assert torch.equal(got.isnan(), expected.isnan())
        if not np.isnan(near):
            assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
