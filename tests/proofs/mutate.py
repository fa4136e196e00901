"""Does a test notice when a kernel is broken? Each kernel is, in ten ways, one place at a time.

    python tests/proofs/mutate.py [lesson ...]

runs the proofs, then the lesson's own tests, on each broken copy of a lesson, interpreted.
"""

import ast
import collections
import contextlib
import os
import random
import resource
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ["TRITON_INTERPRET"] = "1"
TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "proofs"), str(TESTS.parent / "docs" / "_ext")]

import hypothesis  # noqa: E402
import interpreter_bf16  # noqa: E402
import lesson_code  # noqa: E402
import matplotlib.pyplot  # noqa: F401, E402
import pytest  # noqa: E402
from cases import check, draw  # noqa: E402
from operators import OPERATORS  # noqa: E402
from test_operators import UNPROVEN, lesson_of, memcheck  # noqa: E402

# What lessons import is imported here, once, and not in each process.
SECONDS = 200  # of CPU time for one broken copy; then it counts as noticed
PROOFS, OWN, NOBODY, BROKEN = 10, 11, 12, 13  # how a process ends
OPTIONS = ["-x", "-q", "--tb=no", "-m", "not full and not gpu"]
OPTIONS += ["-p", "no:cacheprovider", "--hypothesis-profile=mutants"]
# No test in the interpreter runs them.
LEFT_OUT = {"thread_kernel", "runtime_range_kernel", "odd_range_kernel"}
# Kernel, what is done to it, the text or its line: why the results stay as they are.
NOT_STORED = "what is masked here is not stored either"
IS_WIDE = "the sum, product or maximum of a narrow and a wide number is wide anyway"
FIRST_ALPHA = "the first key that a row sees multiplies it by 0; if none, it divides a 0"
HARMLESS = {
    (
        "norm_kernel",
        "another other",
        "value = tl.load(x_ptr + at * stride_xn, mask=at < N, other=0)",
    ): NOT_STORED,
    (
        "norm_kernel",
        "another other",
        "y *= tl.load(w_ptr + at, mask=at < N, other=0).to(dtype)",
    ): NOT_STORED,
    (
        "norm_kernel",
        "another other",
        "y += tl.load(b_ptr + at, mask=at < N, other=0).to(dtype)",
    ): NOT_STORED,
    (
        "norm_kernel",
        "no cast",
        "tl.load(x_ptr + at * stride_xn, mask=mask, other=0).to(dtype)",
    ): IS_WIDE,
    ("norm_kernel", "no cast", "tl.load(w_ptr + at, mask=at < N, other=0).to(dtype)"): IS_WIDE,
    ("norm_kernel", "no cast", "tl.load(b_ptr + at, mask=at < N, other=0).to(dtype)"): IS_WIDE,
    ("norm_kernel", "no cast", "d = tl.where(at < N, value.to(dtype) - mean, 0)"): IS_WIDE,
    ("norm_kernel", "no cast", "y = (value.to(dtype) - mean - slip) * scale"): IS_WIDE,
    ("norm_kernel", "one off", "var < 0"): "0 takes the place of 0",
    (
        "norm_kernel",
        "another other",
        "x *= tl.load(w_ptr + offs, offs < N, 0).to(dtype)",
    ): NOT_STORED,
    (
        "norm_kernel",
        "another other",
        "x += tl.load(b_ptr + offs, offs < N, 0).to(dtype)",
    ): NOT_STORED,
    ("norm_kernel", "no cast", "tl.load(w_ptr + offs, offs < N, 0).to(dtype)"): IS_WIDE,
    ("norm_kernel", "no cast", "tl.load(b_ptr + offs, offs < N, 0).to(dtype)"): IS_WIDE,
    (
        "add_to",
        "another other",
        'old = tl.load(total_ptr + at, mask, 0, cache_modifier=".cg")',
    ): NOT_STORED,
    ("norm_backward_kernel", "no cast", "tl.load(w_ptr + at, live, 0).to(dtype)"): IS_WIDE,
    ("norm_backward_kernel", "no cast", "x.to(dtype)"): IS_WIDE,
    ("reduce_kernel", "size for stride", "stride_os"): "the parts lie one behind the other",
    ("reduce_kernel", "no cast", "tl.load(x_ptrs, mask, NEUTRAL).to(ACC)"): IS_WIDE,
    ("scale_bias_kernel", "no cast", "tl.load(x_ptr + offs, mask=offs < n).to(WIDE)"): IS_WIDE,
    ("swiglu_kernel", "no cast", "tl.load(up_ptr + offs, mask=offs < n).to(WIDE)"): IS_WIDE,
    ("shifted_exp", "no cast", "x.to(m.dtype)"): IS_WIDE,
    ("dq_kernel", "no cast", "out.to(tl.float32)"): IS_WIDE,
    ("dq_kernel", "no cast", "do.to(tl.float32)"): IS_WIDE,
    (
        "forward_kernel",
        "wrong start",
        "total = tl.zeros((BLOCK_M,), tl.float32)",
    ): "the first tile multiplies it by exp2(-3e38), which is 0",
    ("softmax_kernel", "no cast", "tl.max(high, 1)[:, None].to(DTYPE)"): IS_WIDE,
    ("online_kernel", "no cast", "tl.max(x, 0).to(DTYPE)"): IS_WIDE,
    (
        "online_kernel",
        "another other",
        'x = tl.load(ptrs, cols < N, LOWEST, eviction_policy="evict_first")',
    ): NOT_STORED,
    (
        "online_kernel",
        "wrong start",
        "tl.zeros((WIDTH,), DTYPE)",
    ): "the first step multiplies it by 0",
    (
        "cross_entropy_kernel",
        "no cast",
        "x = tl.load(x_ptr + cols * stride_xn, cols < N, LOWEST).to(dtype)",
    ): IS_WIDE,
    (
        "cross_entropy_kernel",
        "no cast",
        'x = tl.load(x_ptr + target * stride_xn, known, float("nan")).to(dtype)',
    ): IS_WIDE,
    (
        "cross_entropy_kernel",
        "wrong start",
        "tl.zeros((THREADS,), dtype)",
    ): "the first step multiplies it by 0",
    (
        "gemm_kernel",
        "one off",
        "pid_n = tl.program_id(0) % tl.cdiv(N, BLOCK_N)",
    ): "only the order of the tiles in a row changes",
    (
        "tile_kernel",
        "one off",
        "pid_n = (tl.program_id(0) % tiles_n).to(tl.int64)",
    ): "only the order of the tiles in a row changes",
    (
        "linear_act_kernel",
        "another other",
        "bias = tl.load(bias_ptr + offs_n * stride_b, offs_n < N, 0.0)",
    ): NOT_STORED,
    (
        "linear_act_kernel",
        "another other",
        "y += tl.load(res, mask, 0.0).to(tl.float32)",
    ): NOT_STORED,
    ("linear_act_kernel", "no cast", "bias.to(tl.float32)"): IS_WIDE,
    ("linear_act_kernel", "no cast", "tl.load(res, mask, 0.0).to(tl.float32)"): IS_WIDE,
    ("linear_act_kernel", "one off", "y < 0"): "0 takes the place of 0",
    ("gelu_kernel", "one off", "x < 0"): "0 times either number is 0",
    ("ticket_kernel", "one off", "now - start < NANO"): "only a GPU has the clock",
    ("attention_kernel", "wrong start", "total = tl.zeros((BLOCK_M,), tl.float32)"): FIRST_ALPHA,
    ("specialised_kernel", "wrong start", "total = tl.zeros((BLOCK_M,), tl.float32)"): FIRST_ALPHA,
    (
        "norm_backward_kernel",
        "no cast",
        "g *= (w if EARLY else tl.load(w_ptr + at, live, 0)).to(dtype)",
    ): IS_WIDE,
}
FLOATS = "tl.float32", "tl.float64", "WIDE", "dtype", "DTYPE", "ACC", "m.dtype"


class Mutant(NamedTuple):
    lesson: str
    kernel: str
    way: str
    line: int
    old: str
    new: str
    code: str  # the line
    source: str  # of the whole lesson, broken

    @property
    def reason(self):
        """Why it is harmless, or nothing."""
        texts = self.old, self.code
        found = [HARMLESS.get((self.kernel, self.way, text)) for text in texts]
        return found[0] or found[1]

    def __str__(self):
        return f"{self.kernel}, line {self.line}, {self.way}: {self.old} -> {self.new}"


class Edits:
    """Texts that may take the place of parts of one function."""

    def __init__(self, source, function):
        self.source, self.function = source.encode(), function
        self.starts = [0]
        for line in self.source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))
        self.parameters = [a.arg for a in function.args.args]

    def span(self, node):
        start = self.starts[node.lineno - 1] + node.col_offset
        return start, self.starts[node.end_lineno - 1] + node.end_col_offset

    def text(self, node):
        return self.source[slice(*self.span(node))].decode()

    def changed(self, *edits):
        """The source with texts in the place of nodes."""
        result = self.source
        for (start, end), text in sorted(((self.span(n), t) for n, t in edits), reverse=True):
            result = result[:start] + text.encode() + result[end:]
        return result.decode()

    def nodes(self, kind):
        statements = self.function.body
        return [n for s in statements for n in ast.walk(s) if isinstance(n, kind)]

    def calls(self, *names):
        return [n for n in self.nodes(ast.Call) if ast.unparse(n.func) in names]

    def without(self, call, position, *names):
        """The call without an argument, given by position or name."""
        kept = [self.text(a) for i, a in enumerate(call.args) if i < position]
        kept += [self.text(k) for k in call.keywords if k.arg not in names]
        return f"{self.text(call.func)}({', '.join(kept)})"

    def floor(self, cdiv):
        """The quotient rounded down instead of up."""
        return "(({}) // ({}))".format(*map(self.text, cdiv.args))


def no_load_mask(edits):
    for call in edits.calls("tl.load"):
        yield [(call, edits.without(call, 1, "mask", "other"))]


def no_store_mask(edits):
    for call in edits.calls("tl.store"):
        yield [(call, edits.without(call, 2, "mask"))]


def sizes_swapped(edits):
    sizes = [name for name in edits.parameters if len(name) == 1 and name.isupper()]
    for one, other in zip(sizes, sizes[1:]):
        swap = {one: other, other: one}
        yield [(n, swap[n.id]) for n in edits.nodes(ast.Name) if n.id in swap]


def size_for_stride(edits):
    sizes = [name for name in edits.parameters if len(name) == 1 and name.isupper()]
    for stride in edits.parameters:
        others = [size for size in sizes if size.lower() != stride[-1]]
        if stride.startswith("stride_") and others:
            yield [(n, others[0]) for n in edits.nodes(ast.Name) if n.id == stride]


def another_other(edits):
    for call in edits.calls("tl.load"):
        given = [k.value for k in call.keywords if k.arg == "other"] + call.args[2:3]
        for node in given:
            yield [(node, 'float("nan")' if edits.text(node) in ("0", "0.0") else "0.0")]


def no_cast(edits):
    for call in edits.nodes(ast.Call):
        is_cast = isinstance(call.func, ast.Attribute) and call.func.attr == "to"
        if is_cast and ast.unparse(call.args[0]) in FLOATS:
            yield [(call, edits.text(call.func.value))]


def wrong_axis(edits):
    turned = {"0": "1", "1": "0", "2": "1", "AXIS": "1 - AXIS", "1 - AXIS": "AXIS"}
    for call in edits.calls("tl.sum", "tl.max", "tl.expand_dims"):
        axis = [k.value for k in call.keywords if k.arg == "axis"] + call.args[1:2]
        for node in axis:
            yield [(node, turned[edits.text(node)])]
    for node in edits.nodes(ast.Subscript):
        text = edits.text(node.slice)
        if text in (":, None", "None, :"):
            yield [(node.slice, "None, :" if text == ":, None" else ":, None")]


def one_off(edits):
    for call in edits.calls("tl.program_id", "tl.arange"):
        yield [(call, f"({edits.text(call)} + 1)")]
    for node in edits.nodes(ast.Compare):
        if isinstance(node.ops[0], ast.Lt):
            yield [(node, f"({edits.text(node.left)} <= {edits.text(node.comparators[0])})")]


def no_tail(edits):
    for call in edits.calls("range"):
        if len(call.args) == 3:
            stop, step = map(edits.text, call.args[1:])
            yield [(call.args[1], f"({stop}) // ({step}) * ({step})")]
    for call in edits.calls("tl.cdiv", "triton.cdiv"):
        yield [(call, edits.floor(call))]


def wrong_start(edits):
    for call in edits.calls("tl.zeros"):
        yield [(call, f"({edits.text(call)} + 1)")]
    for call in edits.calls("tl.full"):
        yield [(call.args[1], "1")]
    for node in edits.nodes(ast.AugAssign):
        yield [(node, f"{edits.text(node.target)} = {edits.text(node.value)}")]


def grid_without_tail(edits):
    """In the function that launches: in the brackets, or where the grid is named."""
    launches = [n.slice for n in edits.nodes(ast.Subscript)]
    named = [n for n in edits.nodes(ast.Assign) if "grid" in ast.unparse(n.targets[0])]
    named += [n for n in edits.nodes(ast.Assign) if "blocks" in ast.unparse(n.targets[0])]
    inside = {id(n) for part in launches + named for n in ast.walk(part)}
    for call in edits.calls("triton.cdiv"):
        if id(call) in inside:
            yield [(call, edits.floor(call))]


WAYS = [no_load_mask, no_store_mask, sizes_swapped, size_for_stride, another_other]
WAYS += [no_cast, wrong_axis, one_off, no_tail, wrong_start]


def mutants(lesson):
    """All broken copies of a lesson."""
    source = lesson_code.find()[lesson].read_text("utf-8")
    for function in ast.parse(source).body:
        if isinstance(function, ast.FunctionDef) and function.name not in LEFT_OUT:
            is_kernel = "triton.jit" in map(ast.unparse, function.decorator_list)
            edits = Edits(source, function)
            for way in WAYS if is_kernel else [grid_without_tail]:
                for changes in way(edits):
                    broken = edits.changed(*changes) if changes else source
                    if broken != source:
                        node, new = changes[0]
                        code = source.splitlines()[node.lineno - 1].strip()
                        place = way.__name__.replace("_", " "), node.lineno, edits.text(node), new
                        yield Mutant(lesson, function.name, *place, code, broken)


def proofs_fail(lesson):
    """Whether one of as many drawn cases as in the tests is wrong."""
    for operator in OPERATORS.values():
        if operator.lesson == lesson and operator.capability == (8, 0):
            for number in range(operator.examples):
                try:
                    case = draw(random.Random(number), operator)
                    check(operator, lesson_of(operator), case, "cpu", memcheck)
                except Exception:
                    return True
    return False


def outcome(mutant, log):
    """Run the tests in this process, with the broken copy in the place of the lesson."""
    known = lesson_code.find()
    copy = Path(log.name).parent / known[mutant.lesson].name
    copy.write_text(mutant.source, "utf-8")
    lesson_code.find = lambda: known | {mutant.lesson: copy}
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    if proofs_fail(mutant.lesson):
        return PROOFS
    lessons = f"{TESTS}/lessons"
    whole = f"{lessons}/test_memcheck.py::test_no_false_alarm_in_a_lesson[{mutant.lesson}]"
    code = pytest.main([*OPTIONS, f"{lessons}/test_{mutant.lesson}.py", whole])
    if code == pytest.ExitCode.TESTS_FAILED:
        return OWN
    return NOBODY if code == pytest.ExitCode.OK else BROKEN


def start(mutant, folder):
    """A process for one mutant; its number."""
    pid = os.fork()
    if pid == 0:
        code = BROKEN
        with contextlib.suppress(BaseException):
            resource.setrlimit(resource.RLIMIT_CPU, (SECONDS, SECONDS))
            with open(Path(tempfile.mkdtemp(dir=folder)) / "log.txt", "w") as log:
                code = outcome(mutant, log)
        os._exit(code)
    return pid


def run(everything):
    """Pairs of mutant and how its process ended, as many at a time as there are cores."""
    interpreter_bf16.install()
    hypothesis.settings.register_profile(
        "mutants",
        derandomize=True,
        database=None,
        phases=[hypothesis.Phase.explicit, hypothesis.Phase.generate],
    )
    waiting, running = list(everything), {}
    with tempfile.TemporaryDirectory() as folder:
        while waiting or running:
            while waiting and len(running) < os.cpu_count():
                mutant = waiting.pop(0)
                running[start(mutant, folder)] = mutant
            pid, status = os.wait()
            yield running.pop(pid), os.waitstatus_to_exitcode(status)


def main(lessons):
    """Break the lessons, print who noticed, and return how many kernels nobody did without reason."""
    everything = [mutant for lesson in lessons for mutant in mutants(lesson)]
    survivors, noticed = [], collections.Counter()
    for mutant, code in run([mutant for mutant in everything if not mutant.reason]):
        if code in (NOBODY, BROKEN):
            survivors.append(mutant)
        else:
            noticed[mutant.lesson, code if code in (PROOFS, OWN) else "crash"] += 1
        print(".", end="", flush=True)
    columns = ["broken", "proofs", "own tests", "crash", "harmless", "survived"]
    print("\n\n" + f"{'lesson':18}" + "".join(f"{column:>11}" for column in columns))
    for lesson in lessons:
        own = [mutant for mutant in everything if mutant.lesson == lesson]
        counts = [len(own), *(noticed[lesson, way] for way in (PROOFS, OWN, "crash"))]
        counts += [sum(mutant.reason is not None for mutant in own)]
        counts += [sum(mutant.lesson == lesson for mutant in survivors)]
        print(f"{lesson:18}" + "".join(f"{count:11}" for count in counts))
    for mutant in everything:
        if mutant.reason:
            print(f"harmless: {mutant}\n    {mutant.reason}")
    for mutant in survivors:
        print(f"survived: {mutant}")
    return len(survivors)


if __name__ == "__main__":
    right = [lesson for lesson in lesson_code.find() if lesson not in UNPROVEN]
    sys.exit(main(sys.argv[1:] or right) > 0)
