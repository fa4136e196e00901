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
    mask_n, mask_b = (rows < N)[None, :], (batch < B)[:, None]
    w_ptr += rows.to(tl.int64)[None, :] * stride_w
    x_ptr += batch[:, None].to(tl.int64) * stride_x
    acc = tl.zeros((16, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        at = start + cols
        w = tl.load(w_ptr + at[:, None], mask=mask_n & (at < K)[:, None], other=0)
        x = tl.load(x_ptr + at[None, :], mask=mask_b & (at < K)[None, :], other=0)
        # As the last bits of a float16, w + 128 stands for 1024 + w + 128.
        bits = (w.to(tl.uint8, bitcast=True) ^ 0x80).to(tl.uint16) | 0x6400
        w = (bits.to(tl.float16, bitcast=True) - 1152).to(x.dtype)
        acc = tl.dot(x, w, acc)
    acc *= tl.load(scale_ptr + rows, mask=rows < N)[None, :]
    to = out_ptr + batch[:, None].to(tl.int64) * stride_o + rows[None, :]
    tl.store(to, acc, mask=mask_n & mask_b)


def int8_decode(x, w, scale, out, tile=(32, 256, 4, 4)):
    (B, K), N = x.shape, w.shape[0]
    BLOCK_N, BLOCK_K, warps, stages = tile
    strides = x.stride(0), w.stride(0), out.stride(0)
    int8_decode_kernel[(triton.cdiv(N, BLOCK_N),)](
        x, w, scale, out, B, N, K, *strides, BLOCK_N, BLOCK_K, num_warps=warps, num_stages=stages
    )
