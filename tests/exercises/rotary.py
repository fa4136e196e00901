import triton
import triton.language as tl


@triton.jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, position_ptr, out_ptr, H, D, HALF,
    stride_xt, stride_xh, stride_ot, stride_oh,
    HEADS: tl.constexpr, BLOCK: tl.constexpr, REST: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    heads = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None].to(tl.int64)
    x_ptr += token * stride_xt + heads * stride_xh
    out_ptr += token * stride_ot + heads * stride_oh
    cols = tl.arange(0, BLOCK)[None, :]
    angle = tl.load(position_ptr + token) * HALF + cols
    cos = tl.load(cos_ptr + angle, mask=cols < HALF)
    sin = tl.load(sin_ptr + angle, mask=cols < HALF)
    mask = (heads < H) & (cols < HALF)
    a = tl.load(x_ptr + cols, mask=mask).to(tl.float32)
    b = tl.load(x_ptr + HALF + cols, mask=mask).to(tl.float32)
    if REST:
        cols_rest = 2 * HALF + tl.arange(0, REST)[None, :]
        mask_rest = (heads < H) & (cols_rest < D)
        rest = tl.load(x_ptr + cols_rest, mask=mask_rest)
        tl.store(out_ptr + cols_rest, rest, mask=mask_rest)
    tl.store(out_ptr + cols, a * cos - b * sin, mask=mask)
    tl.store(out_ptr + HALF + cols, b * cos + a * sin, mask=mask)


def rotary(x, cos, sin, position, out, tile=(1024, 2)):
    T, H, D = x.shape
    half = cos.shape[1]
    block = triton.next_power_of_2(half)
    heads = max(1, min(triton.next_power_of_2(H), tile[0] // block))
    rest = triton.next_power_of_2(D - 2 * half) if D > 2 * half else 0
    if T and H:
        grid = (T, triton.cdiv(H, heads))
        strides = *x.stride()[:2], *out.stride()[:2]
        constants = dict(HEADS=heads, BLOCK=block, REST=rest, num_warps=tile[1])
        rotary_kernel[grid](x, cos, sin, position, out, H, D, half, *strides, **constants)
