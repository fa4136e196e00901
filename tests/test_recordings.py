"""The course's recordings: fresh, whole, free of this or that machine's paths, and fast enough."""

import re

import pytest
import recordings
import runs
from lessons import find
from measured import Query
from mini_site import ROOT, conf

HOMES = sorted(path.parent for path in runs.COMMITTED.glob("*/*/manifest.json"))
SHOWN = conf("recorded_gpu")

ROW_SUMS = "op=sum dim=1 dtype=float32 M>1"  # widths 256 … 2**20

# What the recorded run must have reached: a query's value and the least it may be.
REACHED = {
    "nvidia-h200": [
        ("vector_add min(triton/torch) metric=GB/s dtype=float32 N>=2**20 N<=2**26", 0.98),
        ("vector_add triton/torch metric=GB/s dtype=float32 N=98432000", 0.98),
        ("vector_add min(triton/torch) metric=GB/s dtype=float32 N>=2**27", 0.98),
        ("vector_add triton/ceiling metric=GB/s dtype=float32 N=2**26", 0.97),
        ("vector_add min(triton/ceiling) metric=GB/s dtype=float32 N>=2**27", 0.97),
        ("copy min(triton/ceiling) metric=GB/s dtype=float32 N>=2**26", 0.97),
        ("measuring triton/ceiling metric=TFLOP/s kind=fma K=1", 0.95),
        ("measuring triton/ceiling metric=TFLOP/s kind=fma K=8192", 0.85),
        ("fused_elementwise min(triton/ceiling) metric=GB/s op=scale_bias N>=2**26", 0.97),
        ("fused_elementwise min(triton/ceiling) metric=GB/s op=swiglu N>=2**26", 0.97),
        ("fused_elementwise min(triton/ceiling) metric=GB/s op=gelu N>=2**26", 0.97),
        ("fused_elementwise min(triton/ceiling) metric=GB/s op=gelu_tanh N>=2**26", 0.97),
        ("fused_elementwise min(triton/torch.compile) metric=GB/s N>=2**12", 0.98),
        ("fused_elementwise triton/torch metric=GB/s op=chain K=8", 7.5),
        ("softmax min(triton/ceiling) metric=GB/s dtype=float32 N<=32768", 0.95),
        ("softmax min(triton/ceiling) metric=GB/s dtype=bfloat16 N<=512", 0.95),
        ("softmax min(triton/ceiling) metric=GB/s dtype=bfloat16 N>=1000 N<=16384", 0.95),
        ("softmax triton/ceiling metric=GB/s dtype=bfloat16 N=781", 0.82),
        ("softmax triton/ceiling metric=GB/s dtype=bfloat16 N=32768", 0.9),
        ("softmax triton/ceiling metric=GB/s dtype=float32 N=65536", 0.8),
        ("softmax triton/ceiling metric=GB/s dtype=bfloat16 N=65536", 0.66),
        ("softmax min(triton/ceiling) metric=GB/s N>=131072 N<=524288", 0.6),
        ("softmax min(triton/ceiling) metric=GB/s N=1048576", 0.55),
        ("softmax min(triton/torch) metric=GB/s N>=256", 1.0),
        ("softmax min(triton/torch.compile) metric=GB/s N>=256", 1.0),
        ("softmax geomean(triton/torch) metric=GB/s N>=256", 1.5),
        (f"reductions min(triton/triton:read) metric=GB/s {ROW_SUMS}", 0.90),
        (f"reductions min(triton/torch) metric=GB/s {ROW_SUMS}", 1.0),
        ("strides_2d triton/ceiling metric=GB/s op=copy_2d view=contiguous", 0.97),
        ("strides_2d triton/ceiling metric=GB/s op=transpose dtype=float32", 0.92),
        ("strides_2d triton/ceiling metric=GB/s op=transpose dtype=float16", 0.88),
        ("norms min(triton/ceiling) metric=GB/s dtype=bfloat16 N<16384", 0.95),
        ("norms min(triton/ceiling) metric=GB/s dtype=bfloat16 N=16384", 0.92),
        ("norms geomean(triton/torch.compile) metric=GB/s dtype=bfloat16 N<=16384", 1.0),
        ("norms min(triton/torch.compile) metric=GB/s dtype=bfloat16 N<=16384", 0.95),
        ("norms geomean(triton/torch) metric=GB/s dtype=bfloat16 N<=16384", 1.5),
        ("llm_operators triton/ceiling metric=us op=cross_entropy M=4096", 0.95),
        ("llm_operators triton/torch metric=us op=cross_entropy M=4096", 3.5),
        ("llm_operators triton/torch.compile metric=us op=cross_entropy M=4096", 2.4),
        ("gemm triton/cublas metric=TFLOP/s M=4096 kind=float16", 0.85),
        ("gemm triton/cublas metric=TFLOP/s M=8192 kind=float16", 0.85),
        ("autotune min(triton/triton:best) metric=us M>=16", 0.97),
        ("diagnosis triton/triton:exact metric=TFLOP/s", 4),
        ("diagnosis triton/torch metric=TFLOP/s", 1.0),
        # On Hopper, 8-bit sums that never go to float32 are far from it.
        ("gemm triton metric=error K=65536 kind=e4m3,None", 1e-3),
        *(
            (f"gemm_fast {how}(triton/cublas) metric=TFLOP/s dtype={dtype} N>=2048", least)
            for dtype in ("float16", "bfloat16")
            for how, least in (("geomean", 0.95), ("min", 0.9))
        ),
        ("gemm_fast triton/cublas metric=TFLOP/s M=1024 dtype=float16", 0.9),
        ("attention min(triton/sdpa:flash) metric=TFLOP/s", 1.2),
        ("attention geomean(triton/sdpa:cudnn) metric=TFLOP/s dtype=float16", 0.92),
        ("attention min(triton/sdpa:cudnn) metric=TFLOP/s dtype=float16", 0.85),
        ("attention_backward geomean(triton/sdpa:flash) metric=TFLOP/s", 1.0),
        ("attention_backward min(triton/sdpa:flash) metric=TFLOP/s", 1.0),
        ("autograd min(triton/torch) metric=GB/s N>=256", 1.0),
        ("autograd min(triton/ceiling) metric=GB/s N>=1024 N<=4096", 0.9),
        ("gemm_epilogue geomean(triton/torch) metric=us M>=512", 1.1),
        ("gemm_epilogue geomean(triton/torch.compile) metric=us M>=512", 1.0),
    ]
}

# What it has not reached, and how far it got. Whoever reaches it takes the line out.
MISSED = {
    "softmax min(triton/torch.compile) metric=GB/s N>=256": 0.996,
    "gemm_epilogue geomean(triton/torch) metric=us M>=512": 1.017,
}


@pytest.mark.parametrize("stem", find())
def test_shown_recording_fits_the_code(stem):
    """Where this fails, record the lesson again: make record LESSON=… on a GPU."""
    lesson = find()[stem]
    recording = runs.load(runs.committed_home(lesson, SHOWN), lesson)
    assert recording.gpu["slug"] == SHOWN


@pytest.mark.parametrize("home", HOMES, ids=lambda home: f"{home.parent.name}-{home.name}")
def test_recording_is_well_formed(home):
    recording = recordings.read(home)
    assert home.name in find(), "no lesson has this stem"
    assert recording.gpu["slug"] == home.parent.name
    known = set(recording.manifest["files"]) | {"manifest.json"}
    assert {
        path.relative_to(home).as_posix() for path in home.rglob("*") if path.is_file()
    } == known
    for name in known:
        text = (home / name).read_text("utf-8")
        assert not re.search(r"/(?:home|root|tmp|usr|opt|work|mnt)/", text), f"a path in {name}"
        assert len(text.encode()) <= 150_000, f"{name} is too large"
    for provider in {row["provider"] for row in recording.results}:
        known = r"triton(:.+)?|torch|torch\.compile|cublas|sdpa:flash|sdpa:cudnn|ceiling"
        assert re.fullmatch(known, provider)


@pytest.mark.parametrize(
    "slug, query, least", [(slug, *rest) for slug, rows in REACHED.items() for rest in rows]
)
def test_recorded_speed(slug, query, least):
    parsed = Query.parse(query)
    results = recordings.read(runs.COMMITTED / slug / parsed.lesson).results
    value = parsed.value(results)
    if query in MISSED:
        assert MISSED[query] <= value < least
    else:
        assert value >= least


def test_stale_is_not_taken_for_fresh(tmp_path):
    """The check above can fail: a changed cell has another hash."""
    stem, lesson = next(iter(find().items()))
    changed = tmp_path / "1_part" / lesson.path.name
    changed.parent.mkdir()
    changed.write_text(lesson.path.read_text("utf-8") + "\nprint(1)\n", "utf-8")
    with pytest.raises(recordings.RecordingError, match="the code has changed"):
        runs.load(runs.COMMITTED / SHOWN / stem, type(lesson)(changed))


def test_the_shown_gpu_is_recorded():
    assert (ROOT / "docs" / "recordings" / SHOWN).is_dir()
