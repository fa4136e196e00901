import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, V, stride_x, stride_loss, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    loss = 0.0
    if target != -100:
        x_ptr += row * stride_x
        cols = tl.arange(0, BLOCK)
        largest = float("-inf")
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, V, BLOCK):
            mask = start + cols < V
            x = tl.load(x_ptr + start + cols, mask=mask, other=float("-inf")).to(tl.float32)
            new = tl.maximum(largest, tl.max(x))
            base = tl.where(new == float("-inf"), 0.0, new)  # nothing but -inf so far
            sums = sums * tl.exp(largest - base) + tl.exp(x - base)
            largest = new
        loss = largest + tl.log(tl.sum(sums)) - tl.load(x_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row * stride_loss, loss)


def cross_entropy(logits, targets, loss, tile=(8192, 8)):
    (M, V), (BLOCK, warps) = logits.shape, tile
    if M:
        strides = logits.stride(0), loss.stride(0)
        cross_entropy_kernel[(M,)](logits, targets, loss, V, *strides, BLOCK, num_warps=warps)
