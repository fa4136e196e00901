import triton
import triton.language as tl


@triton.jit
def int8_decode_kernel(
    x_ptr, w_ptr, scale_ptr, out_ptr, B, N, K, stride_x, stride_w, stride_o,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    batch = tl.arange(0, 16)
    cols = tl.arange(0, BLOCK_K)
    mask_n, mask_b = rows < N, batch < B
    w_ptr += rows.to(tl.int64)[:, None] * stride_w
    x_ptr += batch[None, :].to(tl.int64) * stride_x
    acc = tl.zeros((BLOCK_N, 16), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + cols
        w = tl.load(w_ptr + at[None, :], mask=mask_n[:, None] & (at < K)[None, :], other=0)
        x = tl.load(x_ptr + at[:, None], mask=mask_b[None, :] & (at < K)[:, None], other=0)
        acc = tl.dot(w.to(x.dtype), x, acc)
    acc *= tl.load(scale_ptr + rows, mask=mask_n)[:, None]
    to = out_ptr + batch[None, :].to(tl.int64) * stride_o + rows[:, None]
    tl.store(to, acc, mask=mask_n[:, None] & mask_b[None, :])


def int8_decode(x, w, scale, out, tile=(64, 128, 4, 4)):
    (B, K), N = x.shape, w.shape[0]
    BLOCK_N, BLOCK_K, warps, stages = tile
    strides = x.stride(0), w.stride(0), out.stride(0)
    int8_decode_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, w, scale, out, B, N, K, *strides, BLOCK_N, BLOCK_K, num_warps=warps, num_stages=stages
    )
