"""Check every address that a Triton kernel uses, without a GPU.

Put this file beside your kernel. Run the kernel in Triton's interpreter:

    import os
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

    import triton
    from triton_memcheck import memcheck

    with memcheck():
        kernel[grid](x, out, n, BLOCK=256)

Two kinds of problems are found:

- A load, store or atomic out of bounds. The bounds are those of the tensor
  that was passed, and of a view if it is one: neither what lies around a slice
  belongs to it, nor what lies between the rows of a window.
- A conflict: two programs use one place, at least one of them writes, and not
  both by atomics. Programs run in any order, so luck decides what comes out.

Positions out of bounds are masked off, and the kernel goes on. At the end of
the block a MemcheckError is raised, with file and line, program, argument, and
offsets in elements from the first one of the tensor. Its ``problems`` is the
complete list; ``with memcheck() as problems`` gives it too.

Good to know:

- A pointer keeps the tensor it came from: through sums, shapes, loops, block
  pointers, descriptors. If it becomes a number on its way, or is chosen from
  two tensors (``tl.where``, ``tl.join``), then it may point into any tensor
  argument. A tensor that is none, found by its address in a table, is unknown
  here: its accesses are reported as out of bounds.
- Programs that meet at one integer, by an atomic on a single place that is not
  relaxed, count as ordered from there on. So a lock is no conflict, nor is a
  counter that tells the last program. Nobody checks that it heeds the answer.
- Neither values are checked, nor two positions of one program.

Written for Triton 3.6 and 3.7. It needs names of the interpreter that are not
public, and says so if one is gone.
"""

import contextlib
import functools
import inspect
import linecache
import operator
import os
import sys
from dataclasses import dataclass
from unittest import mock

import numpy as np
import triton
import triton.language as tl

__all__ = ["memcheck", "MemcheckError", "Problem"]

# Names in triton.runtime.interpreter, and the parameters used here.
PRIVATE = {
    "InterpretedFunction": "",
    "TensorHandle": "data dtype",
    "_implicit_cvt": "arg",
    "GridExecutor": "arg_names",
    "GridExecutor._init_args_hst": "self args_dev kwargs",
    "InterpreterBuilder.set_grid_dim": "nx ny nz",
    "InterpreterBuilder.set_grid_idx": "x y z",
    "InterpreterBuilder.create_bitcast": "src",
    "InterpreterBuilder.create_select": "lhs rhs",
    "InterpreterBuilder.create_join": "lhs rhs",
    "InterpreterBuilder.create_cat": "lhs rhs",
    "InterpreterBuilder.create_masked_load": "ptrs mask",
    "InterpreterBuilder.create_masked_store": "ptrs mask",
    "InterpreterBuilder.create_atomic_rmw": "ptr mask sem",
    "InterpreterBuilder.create_atomic_cas": "ptr cmp val sem",
}
ACCESSES = {
    "create_masked_load": "load",
    "create_masked_store": "store",
    "create_atomic_rmw": "atomic",
    "create_atomic_cas": "atomic",
}
# With which accesses of other programs does an access not get along?
RIVALS = {
    "load": ("store", "atomic"),
    "store": ("store", "load", "atomic"),
    "atomic": ("store", "load"),
}
DONE = {"load": "loaded", "store": "stored", "atomic": "updated atomically"}
PLACES, EXAMPLES = 10, 3  # at most so many in the message of an error


@dataclass
class Problem:
    """One access of one program to places that it should not touch."""

    kind: str  # "load", "store" or "atomic"
    tensor: str  # the name of the kernel's argument
    offsets: list[int]  # in elements, from the first one of the tensor
    program: tuple[int, int, int]
    rival: tuple[int, int, int] | None  # the other program in a conflict
    rule: str  # what was violated
    detail: str  # what the other program did
    file: str
    line: int

    def place(self):
        """What problems at one line of a kernel have in common."""
        code = linecache.getline(self.file, self.line).strip()
        return (
            f"{os.path.basename(self.file)}:{self.line}: "
            f"{self.kind} of {self.tensor} {self.rule}\n        {code}"
        )

    def __str__(self):
        low, high = self.offsets[0], self.offsets[-1]
        where = f"{low}" if low == high else f"{low} .. {high}"
        if len(self.offsets) <= high - low:
            where += f", {len(self.offsets)} of them"
        return f"program {self.program}: {self.tensor}[{where}]{self.detail}"


class MemcheckError(RuntimeError):
    """What was found in a block, with the complete list in ``problems``."""

    def __init__(self, problems):
        self.problems = problems
        places = {}
        for problem in problems:
            places.setdefault(problem.place(), []).append(problem)
        lines = [f"{len(problems)} found"]
        for place, found in list(places.items())[:PLACES]:
            lines.append(place)
            lines += [f"    {problem}" for problem in found[:EXAMPLES]]
            if len(found) > EXAMPLES:
                lines.append(f"    and {len(found) - EXAMPLES} more here")
        if len(places) > PLACES:
            lines.append(f"and {len(places) - PLACES} more places")
        super().__init__("\n".join(lines))


class _Memory:
    """The bytes that tensors share, and which programs used each of them.

    For each kind of access, two rows: the last program, and another one
    before it. A program is its number, from 1; nobody is 0.
    """

    def __init__(self, storage):
        self.start = storage.data_ptr()
        shape = 2, storage.nbytes()
        self.users = {kind: np.zeros(shape, np.int32) for kind in RIVALS}


class _View:
    """A tensor argument: its name, and which bytes are its own."""

    def __init__(self, name, tensor, memory):
        self.name, self.memory = name, memory
        self.start, self.item = tensor.data_ptr(), tensor.element_size()
        self.is_integer = not tensor.is_floating_point()
        self.shape, self.strides = tuple(tensor.shape), tuple(tensor.stride())
        span = 0
        if tensor.numel():
            ends = ((n - 1) * s for n, s in zip(self.shape, self.strides))
            span = 1 + sum(ends)
        self.inside = np.zeros(span * self.item + 1, bool)  # the last: outside
        if span:
            shape = *self.shape, self.item
            strides = *(s * self.item for s in self.strides), 1
            as_strided = np.lib.stride_tricks.as_strided
            as_strided(self.inside, shape, strides)[...] = True

    def contains(self, places):
        """Which addresses, an array of (positions, bytes), are in the view?"""
        end = len(self.inside) - 1
        own = self.inside[np.clip(places - self.start, -1, end)]
        return own.all(axis=-1)


class _Pointer(tl.pointer_type):
    """The type of a pointer that knows from which argument it was made."""

    def __init__(self, plain, view):
        super().__init__(plain.element_ty, plain.address_space, plain.const)
        self.view = view


class _Checker:
    """Hears of launches, programs and accesses; collects the problems."""

    def __init__(self):
        self.problems = []
        self.views = {}  # by the identity of the tensor

    def launch(self, arguments):
        """A kernel starts, with these named arguments."""
        self.views, memories = {}, {}
        for name, tensor in _tensors(arguments):
            storage = tensor.untyped_storage()
            key = storage.data_ptr()
            if key not in memories:
                memories[key] = _Memory(storage)
            self.views[id(tensor)] = _View(name, tensor, memories[key])

    def grid(self, shape):
        self.shape = shape
        self.meetings = {}  # address of an atomic: who has been there

    def program(self, index):
        """A program starts. It comes after nobody (0) and after itself."""
        self.index = index
        self.me = 1 + int(np.ravel_multi_index(index, self.shape))
        self.after = np.zeros(1 + int(np.prod(self.shape)), bool)
        self.after[[0, self.me]] = True

    def access(self, kind, pointers, mask, relaxed):
        """Look at an access; return the mask of what is within bounds."""
        address = np.asarray(pointers.data).astype(np.int64)
        size = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
        mask = np.broadcast_to(np.asarray(mask, bool), address.shape)
        view = getattr(pointers.dtype, "view", None)
        places = address[..., None] + np.arange(size)
        bad = mask.copy()
        for owner in [view] if view else self.views.values():
            good = bad & owner.contains(places) & (address % size == 0)
            if good.any():
                if kind == "atomic" and not relaxed and owner.is_integer:
                    self.meet(address)
                self.compare(kind, owner, places[good])
                bad &= ~good
        if bad.any():
            self.report(kind, view, address[bad])
        return mask & ~bad

    def meet(self, address):
        """Who was at this single integer before has finished its work."""
        if address.size == 1:
            nobody = np.zeros_like(self.after)
            there = self.meetings.setdefault(address.item(), nobody)
            self.after |= there
            there |= self.after

    def compare(self, kind, view, places):
        """Report other programs at these addresses, then add this one."""
        users, index = view.memory.users, places - view.memory.start
        for other in RIVALS[kind]:
            found = users[other][:, index]  # (2, positions, bytes)
            clash = ~self.after[found]
            if clash.any():
                rival = np.unravel_index(found[clash][0] - 1, self.shape)
                hit = places[clash.any(axis=(0, 2)), 0]
                self.report(kind, view, hit, tuple(map(int, rival)), other)
        last, before = users[kind]
        new = index[last[index] != self.me]
        # Keep the one before where only that one is in no order with this one.
        keep = self.after[last[new]] & ~self.after[before[new]]
        before[new] = np.where(keep, before[new], last[new])
        last[new] = self.me

    def report(self, kind, view, address, rival=None, other=None):
        name, offsets, detail = "?", [0], ""
        rule = "at an address in no tensor argument"
        if view:
            name = view.name
            offsets = np.unique((address - view.start) // view.item).tolist()
            rule = f"out of bounds: shape {view.shape}, stride {view.strides}"
        if rival:
            rule = "in conflict with another program"
            detail = f" was {DONE[other]} by program {rival}"
        found = name, offsets, self.index, rival, rule, detail, *_kernel_line()
        self.problems.append(Problem(kind, *found))


def _tensors(arguments):
    """Pairs of name and tensor, also of tuples, descriptors and wrappers."""
    for name, value in arguments:
        if isinstance(value, tuple):
            parts = ((f"{name}[{i}]", part) for i, part in enumerate(value))
            yield from _tensors(parts)
        elif hasattr(value, "untyped_storage"):
            yield name, value
        elif hasattr(value, "base"):
            yield from _tensors([(name, value.base)])


def _kernel_line():
    """File and line of the kernel, from the stack: not here, not in Triton."""
    ours = os.path.dirname(triton.__file__) + os.sep
    frame = sys._getframe()
    while frame.f_back:
        file = frame.f_code.co_filename
        if file != __file__ and not file.startswith(ours):
            break
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _interpreter():
    """Triton's interpreter, if it is in use and is as this file knows it."""
    problem, module = "", None
    try:
        from triton.runtime import interpreter as module
    except ImportError:
        problem = "triton.runtime.interpreter"
    for name, parameters in PRIVATE.items() if module else ():
        try:
            found = operator.attrgetter(name)(module)
        except AttributeError:
            problem = problem or name
            continue
        known = inspect.signature(found).parameters if parameters else ()
        for parameter in parameters.split():
            if parameter not in known:
                problem = problem or f"{name}(..., {parameter}, ...)"
    if problem:
        raise RuntimeError(
            f"memcheck is written for Triton 3.6 and 3.7. Triton "
            f"{triton.__version__} has no {problem} in its interpreter."
        )
    # Triton's own functions are made interpreted, or not, at its import.
    if not isinstance(tl.sum, module.InterpretedFunction):
        late = os.environ.get("TRITON_INTERPRET") == "1"
        why = "too late, Triton had been imported" if late else "not set"
        raise RuntimeError(
            f"memcheck works in Triton's interpreter, but TRITON_INTERPRET=1 "
            f"was {why}. Set it before the first import of triton."
        )
    return module


@contextlib.contextmanager
def memcheck():
    """Check all kernels that are launched in the block; see the module."""
    interpreter = _interpreter()
    if hasattr(interpreter.InterpreterBuilder.create_bitcast, "__wrapped__"):
        raise RuntimeError("memcheck is at work already: one block at a time")
    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
    handle, checker = interpreter.TensorHandle, _Checker()

    def started(original, executor, args, kwargs):
        args, kwargs = original(executor, args, kwargs)
        checker.launch([*zip(executor.arg_names, args), *kwargs.items()])
        return args, kwargs

    def converted(original, arg):
        result = original(arg)
        if hasattr(arg, "data_ptr"):
            view = checker.views.get(id(getattr(arg, "base", arg)))
            if view:
                result.handle.dtype = _Pointer(result.handle.dtype, view)
        return result

    def gridded(original, self, nx, ny, nz):
        checker.grid((nx, ny, nz))
        return original(self, nx, ny, nz)

    def indexed(original, self, x, y, z):
        checker.program((x, y, z))
        return original(self, x, y, z)

    def cast(original, self, src, *rest):
        result = original(self, src, *rest)
        known = isinstance(src.dtype, _Pointer)
        if known and isinstance(result.dtype, tl.pointer_type):
            result.dtype = _Pointer(result.dtype, src.dtype.view)
        return result

    def merged(original, self, *arguments):
        result = original(self, *arguments)
        lhs, rhs = (getattr(a.dtype, "view", None) for a in arguments[-2:])
        if lhs is not rhs:
            if isinstance(result.dtype, tl.pointer_type):
                result.dtype = tl.pointer_type(result.dtype.element_ty)
        return result

    def accessed(original, *args, **kwargs):
        call = inspect.signature(original).bind(*args, **kwargs)
        given = call.arguments
        pointers = given["ptrs"] if "ptrs" in given else given["ptr"]
        mask = given.get("mask", np.True_)
        mask = mask.data if isinstance(mask, handle) else mask
        relaxed = "RELAXED" in str(given.get("sem"))
        kind = ACCESSES[original.__name__]
        good = checker.access(kind, pointers, mask, relaxed)
        if "mask" in given:
            given["mask"] = handle(good, tl.int1)
        elif not good.all():  # a compare-and-swap: where bad, it "succeeds"
            answer = np.broadcast_to(given["cmp"].data, good.shape).copy()
            for name in ("ptr", "cmp", "val"):
                data = np.broadcast_to(given[name].data, good.shape)[good]
                given[name] = handle(data, given[name].dtype)
            if good.any():
                answer[good] = original(*call.args, **call.kwargs).data
            return handle(answer, given["cmp"].dtype)
        return original(*call.args, **call.kwargs)

    hooks = [
        (executor, "_init_args_hst", started),
        (interpreter, "_implicit_cvt", converted),
        (builder, "set_grid_dim", gridded),
        (builder, "set_grid_idx", indexed),
        (builder, "create_bitcast", cast),
        (builder, "create_select", merged),
        (builder, "create_join", merged),
        (builder, "create_cat", merged),
        *((builder, name, accessed) for name in ACCESSES),
    ]
    with contextlib.ExitStack() as stack:
        for owner, name, hook in hooks:
            original = getattr(owner, name)
            stack.enter_context(_hooked(owner, name, hook, original))
        try:
            yield checker.problems
        except Exception as error:
            if checker.problems:
                raise MemcheckError(checker.problems) from error
            raise
    if checker.problems:
        raise MemcheckError(checker.problems)


def _hooked(owner, name, hook, original):
    """While this lasts, calls of ``owner.name`` go to the hook."""

    @functools.wraps(original)  # with its name and its parameters
    def replacement(*args, **kwargs):
        return hook(original, *args, **kwargs)

    return mock.patch.object(owner, name, replacement)
