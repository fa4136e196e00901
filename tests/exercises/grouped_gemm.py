import torch
import triton
import triton.language as tl


@triton.jit
def grouped_gemm_kernel(
    x_ptr, w_ptr, ends_ptr, out_ptr, E, N, K,
    stride_x, stride_we, stride_wk, stride_o,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN: tl.constexpr,
):  # fmt: skip
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile_m, tile_n = tl.program_id(0) // tiles_n, tl.program_id(0) % tiles_n
    experts = tl.arange(0, EXPERTS)
    ends = tl.load(ends_ptr + experts, mask=experts < E, other=0)
    begins = tl.load(ends_ptr + experts - 1, mask=(experts > 0) & (experts < E), other=0)
    tiles = tl.cdiv(ends - begins, BLOCK_M)
    tiles = tl.where(experts < E, tiles, 0)
    last = tl.cumsum(tiles)  # of the tiles of an expert, plus one
    expert = tl.sum((last <= tile_m).to(tl.int32))
    if expert < E:
        mine = experts == expert
        begin, end = tl.sum(begins * mine), tl.sum(ends * mine)
        first = tl.sum((last - tiles) * mine)
        rows = begin + (tile_m - first) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        mask_m, mask_n = (rows < end)[:, None], (cols < N)[None, :]
        k = tl.arange(0, BLOCK_K)
        # Rows behind the last are the last again: their products are not stored.
        x_at = x_ptr + tl.minimum(rows, end - 1).to(tl.int64)[:, None] * stride_x + k[None, :]
        w_at = w_ptr + expert.to(tl.int64) * stride_we + cols[None, :]
        w_at += k.to(tl.int64)[:, None] * stride_wk
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            if EVEN:
                x, w = tl.load(x_at), tl.load(w_at)
            else:
                x = tl.load(x_at, mask=(k < K - start)[None, :], other=0)
                w = tl.load(w_at, mask=mask_n & (k < K - start)[:, None], other=0)
            acc = tl.dot(x, w, acc)
            x_at += BLOCK_K
            w_at += tl.cast(BLOCK_K, tl.int64) * stride_wk
        to = out_ptr + rows.to(tl.int64)[:, None] * stride_o + cols[None, :]
        tl.store(to, acc.to(out_ptr.dtype.element_ty), mask=mask_m & mask_n)


def grouped_gemm(x, w, ends, out, tile=(128, 256, 64, 8, 4)):
    (T, K), (E, _, N) = x.shape, w.shape
    large = T * N >= 2**20 and torch.cuda.is_available()
    BLOCK_M, BLOCK_N, BLOCK_K, warps, stages = tile if large else (64, 64, 32, 4, 2)
    tiles = triton.cdiv(T, BLOCK_M) + E  # each expert may leave one tile partly empty
    grid = (tiles * triton.cdiv(N, BLOCK_N),)
    strides = x.stride(0), *w.stride()[:2], out.stride(0)
    constants = dict(EXPERTS=triton.next_power_of_2(E), num_warps=warps, num_stages=stages)
    constants |= dict(BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K)
    constants["EVEN"] = K % BLOCK_K == 0 and N % BLOCK_N == 0
    if T:
        grouped_gemm_kernel[grid](x, w, ends, out, E, N, K, *strides, **constants)
