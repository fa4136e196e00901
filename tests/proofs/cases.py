"""Cases for any operator: sizes, views, values, places to write; and what must hold in each."""

import contextlib
import functools
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

POISON = {True: 0xFF, False: 0x7F}  # bytes around numbers: NaN; a large integer
# Elements behind a view in its buffer; without the cache, its end is the allocation's.
ROOM = 0 if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ else 24
PRIMES = [2, 3, 5, 7, 13, 31, 61, 127, 251, 509, 1021, 2039, 4093]
SIZES = PRIMES + [2**k + d for k in range(4, 13) for d in (-1, 0, 1)]
SIZES = sorted({*SIZES, 1, 48, 80, 112, 240, 1008, 2000, 3008})


def anything(inputs, out, options):
    """No view is refused; an output in which positions share an element always is."""


@dataclass(frozen=True)
class Operator:
    """What a wrapper promises; functions get sizes and options as they are drawn."""

    lesson: str
    function: str
    dtypes: list[torch.dtype]
    tensors: Callable  # sizes, dtype, options -> {name: (shape, dtype)}, with "out"
    exact: Callable  # inputs, options -> the result in float64, or in its dtype
    allowed: Callable | None = None  # inputs, exact, options -> error before the last rounding
    ranks: tuple[int, ...] = (0, 1, 2, 3)  # how many sizes
    most: int = 4096  # product of the sizes, and
    longest: int = 4096  # each of them, in the interpreter
    options: dict[str, list] = field(default_factory=dict)  # choices; _names are not passed
    refusal: Callable = anything  # inputs, out, options -> the error, if it must refuse
    outs: tuple[str, ...] = ("new", "window", "x")  # or the name of an input
    moves_bits: bool = False  # a NaN, too, stays as it is
    extremes: bool = True  # are infinities and the like among the values?
    plain: bool = False  # only contiguous tensors, as nothing is refused
    mostly_plain: tuple[str, ...] = ()  # the tensors that must be contiguous
    examples: int = 90  # in the interpreter, and
    forms: int = 100  # on CUDA: what may be compiled anew
    capability: tuple[int, int] = (8, 0)  # which a GPU needs; above it, not interpreted
    run: Callable | None = None  # lesson -> the function, if it is no wrapper
    title: str = ""

    @property
    def name(self):
        return f"{self.lesson} {self.title or self.function}"


class Layout(NamedTuple):
    """How a view lies in its buffer."""

    start: int = 0
    turned: bool = False  # the first axis is the inner one
    step: int = 1  # between neighbours on the inner axis
    gap: int = 0  # from row to row
    repeat: int | None = None  # an axis of stride 0
    odd: bool = False  # size 1, and a stride that means nothing

    def strides(self, shape):
        strides, next_one = {}, self.step
        axes = range(len(shape))
        for axis in axes if self.turned else reversed(axes):
            strides[axis] = next_one
            next_one = next_one * max(shape[axis], 1) + self.gap
            if axis == self.repeat:
                strides[axis] = 0
            elif self.odd and shape[axis] == 1:
                strides[axis] = 7
        return [strides[axis] for axis in axes]


class Values(NamedTuple):
    """Which numbers an input holds."""

    seed: int
    any_bits: bool = False
    scale: float = 1.0
    shift: float = 0.0
    specials: int = 0


@dataclass(frozen=True)
class Case:
    operator: str
    dtype: torch.dtype
    options: dict[str, Any]
    sizes: tuple[int, ...]
    layouts: dict[str, Layout]
    values: dict[str, Values]
    out: str  # new, window, or an input
    sentinel: int  # each byte of the output before


def draw_sizes(rng, operator, most, longest):
    """In random order, so that any of them may be the long one."""
    sizes = [1] * rng.choice(operator.ranks)
    for axis in rng.sample(range(len(sizes)), len(sizes)):
        limit = max(1, min(most, longest))
        known = [n for n in SIZES if n <= limit]
        sizes[axis] = rng.choice([rng.choice(known), rng.choice(known), rng.randint(1, limit)])
        if rng.randrange(20) == 0:
            sizes[axis] = 0
        most //= max(1, sizes[axis])
    return tuple(sizes)


def draw_layout(rng, operator, name):
    start, odd = rng.choice([0, 0, 1, 3, 16]), rng.choice([False, True])
    mostly_plain = operator.refusal is contiguous or name in operator.mostly_plain
    if operator.plain or mostly_plain and rng.randrange(5):
        return Layout(start, odd=odd)
    turned, repeat = rng.choice([False, True]), rng.choice([None, None, None, None, 0, 1])
    return Layout(start, turned, rng.choice([1, 1, 2, 3]), rng.choice([0, 1, 5, 16]), repeat, odd)


def draw_values(rng, operator, dtype):
    seed = rng.randrange(2**32)
    if not (dtype.is_floating_point and operator.extremes):
        return Values(seed, not dtype.is_floating_point, rng.choice([1.0, 20.0]))
    if rng.randrange(6) == 0:
        return Values(seed, any_bits=True)
    limits = torch.finfo(dtype)
    large = rng.choice([20.0, limits.max**0.5, limits.max / 16])
    scale = rng.choice([1.0, 1.0, large, rng.choice([1e-3, limits.tiny])])
    return Values(seed, False, scale, rng.choice([0.0, 0.0, 3.0]), rng.choice([0, 0, 1, 3, 99]))


def draw(rng, operator, most=None, longest=None):
    """A case, from anything that draws like ``random.Random``."""
    dtype = rng.choice(operator.dtypes)
    options = {name: rng.choice(choices) for name, choices in operator.options.items()}
    sizes = draw_sizes(rng, operator, most or operator.most, longest or operator.longest)
    names = operator.tensors(sizes, dtype, options)
    layouts = {name: draw_layout(rng, operator, name) for name in names}
    values = {name: draw_values(rng, operator, dtype) for name in names if name != "out"}
    out, sentinel = rng.choice(operator.outs), rng.choice([0xFF, 0x5A])
    return Case(operator.name, dtype, options, sizes, layouts, values, out, sentinel)


def again(rng, operator, case):
    """Other values, and other sizes that lead to the same compiled kernel.

    A kernel is compiled anew for another power of two, and for a size that is 1 or a multiple
    of 16: so a size changes by multiples of 16, between the same two powers of two.
    """

    def like(n):
        above = 2 ** math.ceil(math.log2(n)) if n > 1 else n
        return rng.choice([n, *range(above // 2 + 1 + (n - above // 2 - 1) % 16, above + 1, 16)])

    values = {name: draw_values(rng, operator, case.dtype) for name in case.values}
    return replace(case, sizes=tuple(map(like, case.sizes)), values=values)


@functools.cache
def special_values(dtype, device):
    """Infinities, NaN, both zeros, the largest, the smallest, and the smallest normal numbers."""
    limits = torch.finfo(dtype)
    numbers = [math.inf, limits.max, limits.tiny, limits.tiny * limits.eps, 0.0, 1.0]
    numbers = [math.nan, *numbers, *(-n for n in numbers)]
    return torch.tensor(numbers, dtype=torch.float64, device=device)


def place(shape, dtype, layout, device, byte):
    """A view of that layout, in a buffer of such bytes."""
    strides = layout.strides(shape)
    extent = sum((n - 1) * stride for n, stride in zip(shape, strides)) + 1 if all(shape) else 0
    size = (layout.start + extent + ROOM) * dtype.itemsize
    buffer = torch.full((size,), byte, dtype=torch.uint8, device=device)
    return buffer, buffer.view(dtype).as_strided(shape, strides, layout.start)


def write(view, values):
    """Numbers into an input; elements that share a place get one."""
    once = view[tuple(slice(0, 1) if stride == 0 else slice(None) for stride in view.stride())]
    dtype, device = view.dtype, view.device
    generator = torch.Generator(device).manual_seed(values.seed)
    if values.any_bits:
        size = once.numel() * dtype.itemsize
        raw = torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8, device=device)
        numbers = (raw % 2 if dtype == torch.bool else raw).view(dtype).view(once.shape)
    else:
        options = dict(generator=generator, device=device)
        numbers = torch.randn(once.shape, dtype=torch.float64, **options)
        numbers = numbers * values.scale + values.shift
        if values.specials and once.numel() and dtype.is_floating_point:
            at = torch.randint(once.numel(), (values.specials,), **options)
            special = special_values(dtype, device)
            which = torch.randint(len(special), (values.specials,), **options)
            numbers.view(-1)[at] = special[which]
        numbers = numbers.float() if dtype.itemsize == 1 else numbers
    once.copy_(numbers)


def as_bytes(tensor, one_nan):
    """For comparison bit by bit, in which a zero has its sign."""
    if one_nan and tensor.is_floating_point():
        tensor = torch.where(tensor.isnan(), math.nan, tensor)
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def wrong(operator, got, inputs, options):
    """How many bytes or elements are not what they must be: a tensor, nobody waits for it."""
    exact = operator.exact(inputs, options)
    if operator.allowed is None or not got.is_floating_point():
        one_nan = not operator.moves_bits
        return (as_bytes(got, one_nan) != as_bytes(exact.to(got.dtype), one_nan)).sum()
    allowed = operator.allowed(inputs, exact, options).nan_to_num(0, math.inf)
    # Rounding keeps the order, so it is enough to round both ends.
    low, high = (end.to(got.dtype).double() for end in (exact - allowed, exact + allowed))
    value = got.double()
    right = (low <= value) & (value <= high) | (value.isnan() & exact.isnan()) | allowed.isinf()
    return (~right).sum()


def attempt(operator, lesson, case, device, guard=contextlib.nullcontext):
    """Call the operator once, as the case says.

    Returns what it gave, None if it refused as it must; and tensors: how much of that is wrong,
    then for each buffer how many of its other bytes are not what they were.
    """
    tensors = operator.tensors(case.sizes, case.dtype, case.options)
    buffers, inputs = [], {}
    for name in case.values:
        shape, dtype = tensors[name]
        byte = 1 if dtype == torch.bool else POISON[dtype.is_floating_point]
        buffer, view = place(shape, dtype, case.layouts[name], device, byte)
        write(view, case.values[name])
        buffers.append(buffer)
        inputs[name] = view
    shape, dtype = tensors["out"]
    out = None
    if case.out == "window":
        buffer, out = place(shape, dtype, case.layouts["out"], device, case.sentinel)
        buffers.append(buffer)
    elif tensors.get(case.out) == tensors["out"]:
        out = inputs[case.out]
    before = [buffer.clone() for buffer in buffers]
    kept = {name: t.clone() if t is out else t for name, t in inputs.items()}
    refusal = operator.refusal(inputs, out, case.options) or shares_elements(out)
    options = {k: v for k, v in case.options.items() if not k.startswith("_")}
    function = operator.run(lesson) if operator.run else getattr(lesson, operator.function)
    got, faults = None, []
    try:
        with guard():
            got = function(**inputs, **options, out=out)
    except (TypeError, ValueError, IndexError) as error:
        assert type(error) is refusal, f"{case}: {type(error).__name__}: {error}"
    else:
        assert refusal is None, f"{case}: not refused"
        assert out is None or got is out, f"{case}: something else than out is returned"
        assert (got.shape, got.dtype, got.device.type) == (shape, dtype, device), f"{case}: {got}"
        faults.append(wrong(operator, got, kept, case.options))
    for buffer, old in zip(buffers, before):
        if got is not None and buffer.data_ptr() == got.untyped_storage().data_ptr():
            mine = old.view(got.dtype).as_strided(got.shape, got.stride(), got.storage_offset())
            mine.copy_(got)
        faults.append((buffer != old).sum())
    return got, faults


def check(operator, lesson, case, device, guard=contextlib.nullcontext):
    """Call the operator once: it gives what it must, or refuses, and touches nothing else."""
    got, faults = attempt(operator, lesson, case, device, guard)
    counts = [int(count) for count in faults]
    if got is not None:
        assert counts[0] == 0, f"{case}: wrong in {counts[0]} places: {got}"
    assert not any(counts), f"{case}: something else was written"


def shares_elements(out):
    """The error for an output in which positions share an element."""
    if (
        out is not None
        and out.numel()
        and any(n > 1 and stride == 0 for n, stride in zip(out.shape, out.stride()))
    ):
        return ValueError


def contiguous(inputs, out, options):
    """The error for a view that has gaps or is turned."""
    tensors = [*inputs.values()] + [out] * (out is not None)
    return None if all(t.is_contiguous() for t in tensors) else ValueError
