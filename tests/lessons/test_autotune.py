"""gemm tuned, against float64, interpreted and on CUDA; and what its page says of the tuner."""

import functools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from matrices import (
    LAYOUTS,
    SENTINEL,
    SHAPES,
    assert_close,
    beyond_32_bits,
    normals,
    specials,
    view,
)
from refusals import assert_refused

torch = pytest.importorskip("torch")
triton = pytest.importorskip("triton")
from triton.runtime import autotuner  # noqa: E402
from triton.runtime.errors import AutotunerError, OutOfResources  # noqa: E402

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
WITH_BFLOAT16 = ["DTYPES"]  # of the lesson


def assert_right(lesson, a, b):
    """A new tensor, and the inputs as before."""
    before = a.clone(), b.clone()
    c = lesson.gemm(a, b)
    assert (c.shape, c.dtype, c.device) == ((len(a), b.shape[1]), a.dtype, a.device)
    assert c.is_contiguous() and not c.requires_grad
    assert_close(c, a, b)
    for t, old in zip((a, b), before):
        torch.testing.assert_close(t, old, rtol=0, atol=0, equal_nan=True)


def assert_launched(lesson, a, b, layout="contiguous", **config):
    """A configuration writes into a window, all of it, and nowhere else."""
    out, room = view(len(a), b.shape[1], layout, a.dtype, a.device, SENTINEL)
    config = config or lesson.gemm_kernel.configs[0].all_kwargs()
    lesson.launch(lesson.gemm_kernel.fn, a, b, out, **config)
    assert_close(out, a, b)
    out.fill_(SENTINEL)
    assert bool((room == SENTINEL).all()), "written outside of the window"


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
@pytest.mark.parametrize("M, N, K", SHAPES)
def test_sizes(lesson, device, M, N, K, dtype):
    a = normals(M, K, "contiguous", dtype, device, 1)
    b = normals(K, N, "contiguous", dtype, device, 2)
    assert_right(lesson, a, b)


@settings(max_examples=20, deadline=None)
@given(
    sizes=st.tuples(*[st.integers(1, 80)] * 3),
    layouts=st.tuples(*[st.sampled_from(LAYOUTS)] * 2, st.sampled_from(LAYOUTS[:4])),
    dtype=st.sampled_from([F16, BF16]),
    seed=st.integers(0, 99),
)
@example((65, 33, 40), ("transposed", "row", "both sliced"), F16, 0)
@example((33, 65, 17), ("column", "transposed", "transposed"), BF16, 0)
def test_any_strides(lesson, device, sizes, layouts, dtype, seed):
    M, N, K = sizes
    a = normals(M, K, layouts[0], dtype, device, seed)
    b = normals(K, N, layouts[1], dtype, device, seed + 1)
    with mock.patch.object(lesson.gemm_kernel, "configs", lesson.SPACE[6:7]):
        assert_right(lesson, a, b)  # on CUDA each would tune, so one must do
    assert_launched(lesson, a, b, layouts[2], **lesson.SPACE[6].all_kwargs())


@pytest.mark.parametrize("M, N, K", [(131, 259, 67), (208, 272, 80), (1, 300, 129)])
def test_every_configuration(lesson, device, M, N, K):
    """Sizes with a remainder in nearly each tile, odd ones and multiples of 16."""
    for dtype in (F16, BF16):
        a = normals(M, K, "contiguous", dtype, device, 1)
        b = normals(K, N, "transposed" if K == 67 else "contiguous", dtype, device, 2)
        space = lesson.SPACE[::2]  # the interpreter knows neither stages nor warps
        if device == "cuda":
            space = lesson.fitting(lesson.SPACE, {"a_ptr": a})
        for config in space:
            assert_launched(lesson, a, b, **config.all_kwargs())


def test_special_values(lesson, device):
    """Infinities and NaN reach their row or column, and no other result."""
    a, b = specials(70, F16, device)
    exact = a.double() @ b.double()
    got = lesson.gemm(a, b).double()
    torch.testing.assert_close(got, exact, rtol=0, atol=0, equal_nan=True)
    half = torch.full((2, 2), 300.0, dtype=F16, device=device)
    assert lesson.gemm(half, half).isinf().all()
    tiny = torch.full((1, 1), 2.0**-24, dtype=F16, device=device)  # subnormal
    assert lesson.gemm(tiny, torch.ones_like(tiny)).item() == 2.0**-24
    minus = torch.full((1, 1), -0.0, dtype=F16, device=device)
    assert lesson.gemm(minus, torch.ones_like(tiny)).item() == 0


def test_inputs_may_be_one_tensor(lesson, device):
    a = normals(40, 40, "contiguous", F16, device, 5)
    before = a.clone()
    assert_right(lesson, a, a)
    assert_right(lesson, a, a.t())
    assert torch.equal(a, before)


def test_gradients_are_fine_where_none_is_recorded(lesson, device):
    a = torch.ones(5, 5, device=device, dtype=F16, requires_grad=True)
    with torch.no_grad():
        assert not lesson.gemm(a, a).requires_grad
    with torch.inference_mode():
        assert lesson.gemm(a, a).sum().item() == 125


def refusals(x):
    """Arguments, and what must be said, for a 6 × 6 float16 tensor."""
    yield (x.tolist(), x), TypeError, "a is a list, not a torch.Tensor"
    yield (x, 1.0), TypeError, "b is a float, not a torch.Tensor"
    yield (None, None), TypeError, "a is a NoneType"
    for dtype in (torch.float32, torch.float64, torch.int32, torch.int8, torch.bool):
        yield (x.to(dtype), x.to(dtype)), TypeError, f"a has {dtype}; supported"
        yield (x, x.to(dtype)), TypeError, f"b has {dtype}; supported"
    yield (x, x.bfloat16()), TypeError, "b has torch.bfloat16; supported here: [torch.float16]"
    yield (x, x[0]), ValueError, "b has torch.Size([6]), not two sizes"
    yield (x[None], x), ValueError, "a has torch.Size([1, 6, 6])"
    yield (x[0, 0], x), ValueError, "a has torch.Size([]), not two sizes"
    yield (x, x[:5]), ValueError, "a has 6 columns, b has 5 rows"
    yield (x, x.to("meta")), ValueError, "b is on meta; needed: one cuda device"
    yield (x.to("meta"), x.to("meta")), ValueError, "a is on meta; needed: one cuda device"
    yield (x.to_sparse(), x), ValueError, "a is sparse or a negated view"
    yield (x, torch._neg_view(x)), ValueError, "b is sparse or a negated view"
    yield (x.clone().requires_grad_(), x), ValueError, "a requires a gradient; pass a.detach()"
    yield (x, x.clone().requires_grad_()), ValueError, "b requires a gradient; pass b.detach()"
    long = x[:1, :1].expand(1, 2**31 - 1)
    yield (x[:, :1], long), ValueError, "b has torch.Size([1, 2147483647])"


def test_refusals(lesson, device):
    x = normals(6, 6, "contiguous", F16, device, 0).contiguous()
    for arguments, error, message in refusals(x):
        assert_refused(lesson.gemm, arguments, error, message, x)


def test_one_configuration_in_the_interpreter(lesson, device):
    tuner = lesson.gemm_kernel
    assert set(tuner.keys) <= set(tuner.arg_names)
    if device == "cpu":
        [config] = tuner.configs
        assert config in lesson.SPACE and not tuner.cache
    else:
        assert tuner.configs == lesson.SPACE


# What the page says of the tuner. A benchmark of our own stands for the GPU.


def tuner_of(lesson, bench=None, configs=None, key=("n",), **options):
    make = triton.autotune(
        configs or lesson.ADD_SPACE, list(key), do_bench=bench or lesson.once, **options
    )
    return make(lesson.add_kernel.fn)


def tune(lesson, tuner, x):
    lesson.add(tuner, x, x.new_ones(len(x)), x.new_empty(len(x)))


def test_the_key(lesson, device):
    """What tunes again: a named argument, a dtype. What does not: strides, an unknown name."""
    x = torch.zeros(2000, device=device)
    same = [x[:1000], x[:1000], x[1000:], x[::2]]
    for key, lengths in ((["n"], 2), (["N"], 1), (["n", "N"], 2), (["n", "stride_x"], 3)):
        tuner = tuner_of(lesson, key=key)
        for t in same[: len(same) - ("stride_x" in key)]:
            tune(lesson, tuner, t)
            assert len(tuner.cache) == 1
        tune(lesson, tuner, x[::2])
        tune(lesson, tuner, x[:1001])
        assert len(tuner.cache) == lengths
        tune(lesson, tuner, x[:1000].half())
        assert len(tuner.cache) == lengths + 1
    assert list(tuner.cache) == [
        (1000, 1, *["torch.float32"] * 3),
        (1000, 2, *["torch.float32"] * 3),
        (1001, 1, *["torch.float32"] * 3),
        (1000, 1, *["torch.float16"] * 3),
    ]


def test_the_device_is_not_in_the_key(lesson):
    tuner = tuner_of(lesson)
    with mock.patch.object(type(tuner.fn), "run", lambda *arguments, **options: None):
        for device in ("cpu", "meta"):
            tune(lesson, tuner, torch.empty(10, device=device))
    assert len(tuner.cache) == 1


def test_explicit_parameters(lesson, device):
    x = torch.zeros(100, device=device)
    tuner = tuner_of(lesson)
    with pytest.raises(ValueError, match="Conflicting meta-parameters: BLOCK"):
        lesson.add(tuner, x, x, x, BLOCK=512)
    lesson.add(tuner, x, x, x)
    with pytest.raises(TypeError, match="multiple values for keyword argument 'BLOCK'"):
        lesson.add(tuner, x, x, x, BLOCK=512)


def counts(lesson, device, **options):
    """How often 1 was added, in place, after each of three calls."""
    tuner, x = tuner_of(lesson, **options), torch.zeros(1000, device=device)
    for _ in range(3):
        lesson.add(tuner, x, torch.ones_like(x), x)
        assert x.min() == x.max()
        yield int(x[0])


def test_an_in_place_kernel(lesson, device):
    many = len(lesson.ADD_SPACE)
    run = functools.partial(counts, lesson, device)
    assert list(run()) == [many + 1, many + 2, many + 3]
    assert list(run(reset_to_zero=["out_ptr"])) == [1, 2, 3]  # only the first call is reset
    assert list(run(restore_value=["out_ptr"])) == [1, 2, 3]
    one = lesson.ADD_SPACE[:1]
    for options in ({}, {"reset_to_zero": ["out_ptr"]}, {"restore_value": ["out_ptr"]}):
        assert list(run(configs=one, **options)) == [1, 2, 3]  # nothing is tuned, none reset


def test_repairs_act_inside_the_timed_call(lesson, device):
    """Each measured call zeroes, or copies there and back; and one zeroing follows."""

    def bench(call, quantiles):
        before, copies[:] = x[0].item(), []
        call()
        seen.append((before, x[0].item(), *copies))
        return [1.0, 1.0, 1.0]

    def noted(name):
        method = getattr(torch.Tensor, name)

        def run(tensor, *arguments):
            copies.append(name)
            return method(tensor, *arguments)

        return mock.patch.object(torch.Tensor, name, run)

    for option, expected, left in (
        ("restore_value", [(5, 5, "clone", "copy_")] * 3, 6),
        ("reset_to_zero", [(5, 1, "zero_")] + [(1, 1, "zero_")] * 2, 1),
    ):
        seen, copies = [], []
        x = torch.full((1000,), 5.0, device=device)
        one = torch.ones_like(x)
        tuner = tuner_of(lesson, bench, **{option: ["out_ptr"]})
        with noted("clone"), noted("copy_"), noted("zero_"):
            lesson.add(tuner, x, one, x)
        assert seen == expected and (x == left).all()


def test_the_median_decides_and_nothing_else(lesson, device):
    """Not the values: a configuration that leaves work undone is chosen."""
    times = iter([[3.0, 0, 0], [2.0, 9, 9], [2.5, 0, 0]])
    configs = [triton.Config({"BLOCK": block}) for block in (256, 512, 1024)]

    def bench(call, quantiles):
        assert quantiles == (0.5, 0.2, 0.8)
        call()
        return next(times)

    tuner, x = tuner_of(lesson, bench, configs), torch.zeros(1024, device=device)
    lesson.add(tuner, x, torch.ones_like(x), x, (1,))  # a grid for 1024 elements a program
    assert tuner.best_config is configs[1]
    assert (x[512:] == 1).all() and (x[:512] > 1).all()


def test_a_grid_that_is_not_of_meta_leaves_holes(lesson, device):
    """The share that the page's table shows."""
    x, y = torch.randn(2, 2**13, device=device)
    for config in lesson.ADD_SPACE:
        out = torch.full_like(x, math.nan)
        lesson.add(lesson.add_kernel.fn, x, y, out, (2,), **config.all_kwargs())
        done = 2 * config.kwargs["BLOCK"]
        assert torch.equal(out[:done], (x + y)[:done]) and out[done:].isnan().all()


@pytest.mark.parametrize("n", [1, 511, 512, 513, 4097])
def test_add(lesson, device, n):
    """Right for each configuration, dtype, and stride of x; nothing is written around out."""
    for dtype in (F32, F16, torch.float64):
        x, y = torch.randn(3, 2 * n, device=device, dtype=dtype)[:2]
        room = torch.full((n + 32,), math.nan, device=device, dtype=dtype)
        for config in lesson.ADD_SPACE:
            for t in (x[:n], x[::2]):
                room.fill_(math.nan)
                lesson.add(lesson.add_kernel.fn, t, y, room[16:-16], **config.all_kwargs())
                assert torch.equal(room[16:-16], t + y[:n])
                assert room[:16].isnan().all() and room[-16:].isnan().all()


def test_what_does_not_fit_counts_as_infinitely_slow(lesson, device):
    def bench(call, quantiles):
        tried.append(call)
        if len(tried) <= failing:
            raise OutOfResources(300_000, 232_448, "shared memory")
        return lesson.once(call, quantiles)

    x = torch.zeros(10, device=device)
    for failing in (2, 3):
        tried, tuner = [], tuner_of(lesson, bench)
        tune(lesson, tuner, x)
        assert tuner.best_config is lesson.ADD_SPACE[failing % 3]
        slow = [t for t in tuner.configs_timings.values() if t == [math.inf] * 3]
        assert len(slow) == failing


def test_pruning(lesson, device):
    """By a function first, then by a model; a share is one of all configurations.

    (From Triton 3.9 on, of those that are left.)
    """
    half = 3 if triton.__version__ < "3.9" else 2
    six = [triton.Config({"BLOCK": b}, num_warps=w) for b in (512, 1024, 4096) for w in (2, 8)]
    asked = []

    def early(configs, args, **options):
        asked.append((sorted(args), options))
        return configs[2:]

    def model(x_ptr, y_ptr, out_ptr, n, stride_x, BLOCK, num_warps, **rest):
        return -BLOCK * num_warps

    x = torch.zeros(10, device=device)
    for top_k, left in ((1, 1), (3, 3), (0.5, half), (9, 4), (1.0, 4)):
        prune = {"early_config_prune": early, "perf_model": model, "top_k": top_k}
        tuner = tuner_of(lesson, configs=six, prune_configs_by=prune)
        tune(lesson, tuner, x)
        timed = getattr(tuner, "configs_timings", [tuner.best_config])  # one alone is not timed
        assert len(timed) == left and set(timed) <= set(six[2:])
        if left < 4:
            assert tuner.best_config is six[5]
    assert asked[0][0] == ["n", "out_ptr", "stride_x", "x_ptr", "y_ptr"]
    tuner = tuner_of(lesson, prune_configs_by={"early_config_prune": lambda *a, **k: []})
    with pytest.raises(AutotunerError, match="at least one config"):
        tune(lesson, tuner, x)


GPU = SimpleNamespace(multi_processor_count=132)


def tuned(lesson, M, N, K, limit, bench):
    """The tuner of gemm with its whole space, on a GPU that is not there."""
    driver = mock.Mock()
    driver.active.utils.get_device_properties.return_value = {"max_shared_mem": limit}
    options = dict(prune_configs_by=lesson.PRUNE, do_bench=bench)
    tuner = triton.autotune(lesson.SPACE, lesson.KEY, **options)(lesson.gemm_kernel.fn)
    a, b, c = (torch.zeros(s, dtype=F16) for s in ((M, K), (K, N), (M, N)))
    with (
        mock.patch.object(triton.runtime, "driver", driver),
        mock.patch.object(torch.cuda, "get_device_properties", return_value=GPU),
        mock.patch.object(type(tuner.fn), "run", lambda *arguments, **options: None),
    ):
        for rows in (M, M // 2 + 1, M // 2):
            lesson.launch(tuner, a[:rows], b, c)
        yield tuner


def test_pruning_of_the_product(lesson, device):
    if device == "cuda":
        pytest.skip("it simulates a GPU")
    for limit, sizes in ((232_448, (4096, 256, 256)), (101_376, (64, 4096, 64))):
        seen = []
        bench = lambda call, quantiles: seen.append(call()) or [1.0] * 3  # noqa: B023, E731
        [tuner] = tuned(lesson, *sizes, limit, bench)
        kept = tuner.configs_timings
        assert len(kept) == lesson.PRUNE["top_k"]
        assert all(lesson.shared_bytes(config, 2) <= limit for config in kept)
        assert len(tuner.cache) == 2  # M / 2 + 1 shares the power of two, M / 2 has another
        assert len(seen) == 2 * len(kept)


def test_the_cost_model(lesson):
    """A round of programs costs the same full or not; masked parts cost like others."""
    with mock.patch.object(torch.cuda, "get_device_properties", return_value=GPU):
        cost = functools.partial(lesson.cost, torch.zeros(1), num_warps=4)
        assert cost(132 * 64, 64, 10, 64, 64) == cost(64, 64, 10, 64, 64)
        assert cost(133 * 64, 64, 10, 64, 64) == 2 * cost(64, 64, 10, 64, 64)
        assert cost(1, 1, 10, 64, 64) == 10 * (64 * 64 + 64 * 128)
        assert cost(4096, 4096, 1, 128, 256) < cost(4096, 4096, 1, 64, 64)
        assert cost(16, 14336, 1, 16, 128) < cost(16, 14336, 1, 128, 128)


def test_measured_in_turns(lesson, device):
    """Ten rounds, the median of all: what slows a round down meets all alike."""
    calls = {"a": (lambda: 4.0), "b": (lambda: 2.0), "c": (lambda: 3.0)}
    seen, rounds = [], iter([r for r in range(10) for _ in calls])

    def bench(call, **options):
        assert options == {"warmup": 1, "rep": 3, "return_mode": "all"}
        seen.append(call())
        return [call() * (1 + next(rounds))] * 3

    with (
        mock.patch.object(triton.testing, "do_bench", bench),
        mock.patch.object(lesson, "graphed", lambda call: call),
    ):
        us = lesson.in_turns(calls)
    assert seen == [4, 2, 3] * 10
    assert us == {"a": 24_000, "b": 12_000, "c": 18_000}


def test_the_finals(lesson, device):
    """The three best are measured again; the new choice is that of the latest key."""
    x = torch.ones(64, 64, device=device, dtype=F16)
    ms = {config: [float(i)] * 3 for i, config in enumerate(lesson.SPACE[::2])}
    met = []

    def in_turns(calls):
        for config, call in calls.items():
            c.fill_(SENTINEL)
            call()
            assert (c == 64).all()
            met.append(config)
        return {config: -ms[config][0] for config in calls}

    c, cache = torch.empty_like(x), {"old": "kept", "new": "replaced"}
    with (
        mock.patch.multiple(lesson.gemm_kernel, cache=cache, create=True, configs_timings=ms),
        mock.patch.object(lesson, "in_turns", in_turns),
    ):
        lesson.finals(x, x, c)
    assert met == list(ms)[:3]
    assert cache == {"old": "kept", "new": list(ms)[2]}


def test_the_wrapper_holds_finals_once(lesson, device):
    """Where the tuner has met a new key, and only there."""
    x = torch.ones(64, 64, device=device, dtype=F16)
    tuner = triton.autotune(lesson.SPACE[6:8], lesson.KEY, do_bench=lesson.once)
    with (
        mock.patch.object(lesson, "gemm_kernel", tuner(lesson.gemm_kernel.fn)),
        mock.patch.object(lesson, "finals") as finals,
    ):
        for a, held in ((x, 1), (x, 1), (x[:33], 1), (x[:32], 2), (x.t(), 3), (x[:0], 3)):
            assert (lesson.gemm(a, x) == 64).all()
            assert finals.call_count == held


def test_the_space(lesson):
    assert len(set(map(str, lesson.SPACE))) == len(lesson.SPACE) <= 24
    for config in lesson.SPACE:
        sums = config.kwargs["BLOCK_M"] * config.kwargs["BLOCK_N"]
        assert config.num_warps >= 4 and sums <= 128 * 32 * config.num_warps


CACHE = """
import json, os, sys
from types import SimpleNamespace
from unittest import mock
import lesson_code, torch, triton
from triton.backends.compiler import GPUTarget
from triton.runtime import autotuner
from triton.runtime.jit import JITFunction

lesson = lesson_code.load("autotune")
JITFunction.run = lambda *arguments, **options: None
hook = [triton.Config({"BLOCK": b}, pre_hook=id) for b in (512, 1024)]

def measured(space, arch=90, **options):
    runs = []
    def bench(call, quantiles):
        runs.append(call())
        return [1.0 + len(runs)] * 3
    tuner = triton.autotune(space, ["n"], do_bench=bench, **options)(lesson.add_kernel.fn)
    target = SimpleNamespace(get_current_target=lambda: GPUTarget("cuda", arch, 32))
    with mock.patch.object(autotuner, "driver", SimpleNamespace(active=target)):
        x = torch.zeros(1000)
        lesson.add(tuner, x, x, x)
    assert tuner.best_config.kwargs == {"BLOCK": 512}
    return len(runs)

kept = {"cache_results": True}
said = [measured(lesson.ADD_SPACE) for _ in range(2)]
said += [measured(lesson.ADD_SPACE, **kept) for _ in range(2)]
said += [measured(hook, **kept) for _ in range(2)]
said += [measured(lesson.ADD_SPACE, 80, **kept), measured(lesson.ADD_SPACE[:2], **kept)]
os.environ["TRITON_CACHE_AUTOTUNING"] = "1"
said += [measured(lesson.ADD_SPACE)]
print(json.dumps(said))
"""


def test_what_is_kept_on_disk(tmp_path):
    """Nothing by default; with cache_results all but hooks; by compute capability and space."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-c", CACHE]
    child = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == [3, 3, 3, 0, 2, 2, 3, 2, 0]
    assert len(list(tmp_path.glob("*/add_kernel.autotune.json"))) == 3


def test_the_interpreter_keeps_nothing(lesson, device):
    if device == "cuda":
        pytest.skip("it is about the interpreter")
    assert not tuner_of(lesson, cache_results=True).cache_results
    assert not autotuner.knobs.autotuning.cache


on_cuda = pytest.mark.parametrize("device", ["cuda"], indirect=True)


@pytest.mark.gpu
@on_cuda
@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_tuned_on_cuda(lesson, device, dtype):
    for M, N, K in [(1, 1, 1), (129, 257, 65), (512, 1024, 512)]:
        a = normals(M, K, "contiguous", dtype, device, 1)
        b = normals(K, N, "contiguous", dtype, device, 2)
        assert_right(lesson, a, b)
        assert lesson.gemm_kernel.best_config in lesson.fitting(lesson.SPACE, {"a_ptr": a})


def test_offsets_beyond_32_bits(lesson, device):
    room = beyond_32_bits(device)
    a = room.as_strided((3, 128), (1, 2**25))  # a step passes 2**31 elements
    a.copy_(torch.randn(3, 128, device=device))
    b = normals(128, 5, "contiguous", F16, device, 1)
    assert_right(lesson, a, b)
    assert_right(lesson, b.t(), a.t())
    out, a = room.as_strided((3, 5), (2**30, 7), 500), a.contiguous()
    lesson.launch(lesson.gemm_kernel.fn, a, b, out, **lesson.SPACE[6].all_kwargs())
    assert_close(out, a, b)
