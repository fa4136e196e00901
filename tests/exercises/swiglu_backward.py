import triton
import triton.language as tl


@triton.jit
def swiglu_backward_kernel(
    x_ptr, dh_ptr, dx_ptr, N, stride_x, stride_dh, stride_dx, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = cols < N
    x_ptr += row * stride_x
    dx_ptr += row * stride_dx
    gate = tl.load(x_ptr + cols, mask=mask).to(tl.float32)
    up = tl.load(x_ptr + N + cols, mask=mask).to(tl.float32)
    dh = tl.load(dh_ptr + row * stride_dh + cols, mask=mask).to(tl.float32)
    s = 1 / (1 + tl.exp(-gate))
    tl.store(dx_ptr + cols, dh * up * s * (1 + gate * (1 - s)), mask=mask)
    tl.store(dx_ptr + N + cols, dh * gate * s, mask=mask)


def swiglu_backward(x, dh, dx, tile=(2048, 8)):
    (M, N), (BLOCK, warps) = dh.shape, tile
    if M and N:
        grid = (M, triton.cdiv(N, BLOCK))
        strides = x.stride(0), dh.stride(0), dx.stride(0)
        swiglu_backward_kernel[grid](x, dh, dx, N, *strides, BLOCK, num_warps=warps)
