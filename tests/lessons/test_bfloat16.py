"""bfloat16 works on a GPU, and is refused in the interpreter, where it would be wrong."""

import lesson_code
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

CALLS = [  # lesson, call with four rows of sixteen ones or the first four columns, result, refusal
    ("attention", "attention(*[x[None, None]] * 3)", 1, "q has torch.bfloat16; all need one"),
    ("attention_backward", "attention(*[x[None, None]] * 3)", 1, "q has torch.bfloat16; all need"),
    ("autograd", "rms_norm(x)", 1, "x has torch.bfloat16; supported here: .*float64"),
    ("autotune", "gemm(a, a)", 4, "a has torch.bfloat16; supported here: .*float16"),
    ("fused_elementwise", "scale_bias(x, 2, 1)", 3, "x is torch.bfloat16, not a tensor of"),
    ("gemm", "gemm(a, a)", 4, "a has torch.bfloat16; supported here: .*float16"),
    ("gemm_epilogue", "linear_act(a, a)", 4, "x has torch.bfloat16, .*: .torch.float16."),
    ("gemm_fast", "matmul(a, a)", 4, "a has torch.bfloat16; all need one dtype"),
    ("llm_operators", "cross_entropy(x, x[:, 0].long())", 2.7725887, "x is torch.bfloat16; needed"),
    ("norms", "rms_norm(x)", 1, "x has torch.bfloat16; supported here: .*float64"),
    ("reductions", "reduce('sum', x, 0)", 4, "x has torch.bfloat16; supported: .*float64"),
    ("softmax", "softmax(x)", 1 / 16, "x has torch.bfloat16; supported here: .*float64"),
    ("strides_2d", "bias_add(x, x[0])", 2, "x has torch.bfloat16; supported here: .*float64"),
    ("vector_add", "vector_add(x, x)", 2, "x has torch.bfloat16; supported here: .*float64"),
]


@pytest.mark.parametrize("stem, call, result, refusal", CALLS, ids=[stem for stem, *_ in CALLS])
def test_bfloat16(device, stem, call, result, refusal):
    if device == "cuda" and torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("compute capability 8.0 is needed")
    fresh = lesson_code.load.__wrapped__(stem)  # other tests add the dtype to the lesson's list
    x = torch.ones(4, 16, dtype=torch.bfloat16, device=device)
    names = vars(fresh) | {"x": x, "a": x[:, :4].contiguous()}
    if device == "cuda":
        got = eval(call, names)
        torch.testing.assert_close(got, torch.full_like(got, result))
    else:
        with pytest.raises(TypeError, match=refusal):
            eval(call, names)
