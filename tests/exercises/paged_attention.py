import torch
import triton
import triton.language as tl


@triton.jit
def part_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, length_ptr, part_ptr, log_ptr, scale, GROUP, PART,
    stride_qb, stride_qh, stride_kp, stride_ks, stride_kh, stride_vp, stride_vs, stride_vh,
    stride_t, PAGE: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    b, head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    length = tl.load(length_ptr + b)
    begin = part * PART
    end = tl.minimum(begin + PART, length)
    if begin < end:
        g, d = tl.arange(0, 16), tl.arange(0, D)
        heads = head * GROUP + g
        q_at = q_ptr + b.to(tl.int64) * stride_qb + heads[:, None].to(tl.int64) * stride_qh
        q = tl.load(q_at + d[None, :], mask=(g < GROUP)[:, None], other=0)
        k_ptr += head.to(tl.int64) * stride_kh
        v_ptr += head.to(tl.int64) * stride_vh
        largest = tl.full((16,), float("-inf"), tl.float32)
        total = tl.zeros((16,), tl.float32)
        acc = tl.zeros((16, D), tl.float32)
        for start in range(begin, end, BLOCK):
            t = start + tl.arange(0, BLOCK)
            live = t < end
            page = tl.load(table_ptr + b.to(tl.int64) * stride_t + t // PAGE, mask=live, other=0)
            page, slot = page.to(tl.int64), (t % PAGE).to(tl.int64)
            k_at = k_ptr + page * stride_kp + slot * stride_ks
            k = tl.load(k_at[None, :] + d[:, None], mask=live[None, :], other=0)
            v_at = v_ptr + page * stride_vp + slot * stride_vs
            v = tl.load(v_at[:, None] + d[None, :], mask=live[:, None], other=0)
            s = tl.dot(q, k, input_precision="ieee") * scale
            s = tl.where(live[None, :], s, float("-inf"))
            new = tl.maximum(largest, tl.max(s, 1))
            p = tl.exp(s - new[:, None])
            shrink = tl.exp(largest - new)
            total = total * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
            largest = new
        rows = (b * tl.num_programs(2) + part) * tl.num_programs(1) * GROUP + heads
        mask = g < GROUP
        part_at = part_ptr + rows.to(tl.int64)[:, None] * D + d[None, :]
        tl.store(part_at, acc / total[:, None], mask=mask[:, None])
        tl.store(log_ptr + rows, largest + tl.log(total), mask=mask)


@triton.jit
def merge_kernel(
    part_ptr, log_ptr, length_ptr, out_ptr, PART, parts, stride_ob, stride_oh,
    D: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    b, head = tl.program_id(0), tl.program_id(1)
    part, d = tl.arange(0, PARTS), tl.arange(0, D)
    length = tl.load(length_ptr + b)
    live = part * PART < length
    rows = (b * parts + part) * tl.num_programs(1) + head
    logs = tl.load(log_ptr + rows, mask=live, other=float("-inf"))
    largest = tl.where(length > 0, tl.max(logs), 0.0)
    weight = tl.exp(logs - largest)
    at = part_ptr + rows.to(tl.int64)[:, None] * D + d[None, :]
    values = tl.load(at, mask=live[:, None], other=0)
    total = tl.where(length > 0, tl.sum(weight), 1.0)
    to = out_ptr + b.to(tl.int64) * stride_ob + head * stride_oh + d
    tl.store(to, tl.sum(values * weight[:, None], 0) / total)


def paged_attention(q, k, v, table, length, scale, out, tile=(64, 1024, 4, 2)):
    B, H, D = q.shape
    _, S, heads, _ = k.shape
    BLOCK, PART, warps, stages = tile
    parts = triton.cdiv(table.shape[1] * S, PART)
    part = torch.empty(B, parts, H, D, device=q.device)
    log = torch.empty(B, parts, H, device=q.device)
    strides = *q.stride()[:2], *k.stride()[:3], *v.stride()[:3], table.stride(0)
    part_kernel[(B, heads, parts)](
        q, k, v, table, length, part, log, scale, H // heads, PART, *strides,
        PAGE=S, D=D, BLOCK=BLOCK, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    constants = dict(D=D, PARTS=triton.next_power_of_2(parts))
    merge_kernel[(B, H)](part, log, length, out, PART, parts, *out.stride()[:2], **constants)
