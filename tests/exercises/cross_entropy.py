import triton
import triton.language as tl


@triton.jit
def cross_entropy_kernel(
    x_ptr, target_ptr, loss_ptr, V, stride_x, stride_loss, BLOCK: tl.constexpr
):
    LOG2E: tl.constexpr = 1.4426950408889634
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(target_ptr + row)
    loss = 0.0
    if target != -100:
        x_ptr += row * stride_x
        cols = tl.arange(0, BLOCK)
        full = V // BLOCK * BLOCK
        # The last columns come first, so that the loop needs no mask.
        x = tl.load(x_ptr + full + cols, mask=full + cols < V, other=float("-inf")).to(tl.float32)
        largest = tl.max(x) * LOG2E
        base = tl.where(largest == float("-inf"), 0.0, largest)  # nothing but -inf so far
        sums = tl.exp2(x * LOG2E - base)
        for start in tl.range(0, full, BLOCK, num_stages=4):
            x = tl.load(x_ptr + start + cols).to(tl.float32)
            new = tl.maximum(largest, tl.max(x) * LOG2E)
            base = tl.where(new == float("-inf"), 0.0, new)
            sums = sums * tl.exp2(largest - base) + tl.exp2(x * LOG2E - base)
            largest = new
        loss = largest / LOG2E + tl.log(tl.sum(sums)) - tl.load(x_ptr + target).to(tl.float32)
    tl.store(loss_ptr + row * stride_loss, loss)


def cross_entropy(logits, targets, loss, tile=(8192, 8)):
    (M, V), (BLOCK, warps) = logits.shape, tile
    if M:
        strides = logits.stride(0), loss.stride(0)
        cross_entropy_kernel[(M,)](logits, targets, loss, V, *strides, BLOCK, num_warps=warps)
