"""Compile a lesson's kernel for a GPU that is not there, and report what came out.

Triton's compiler and NVIDIA's assembler need no GPU. They need a process
without TRITON_INTERPRET, so `compile_kernel` and its kin start a child: this
file, which reads jobs as JSON and writes reports as JSON.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")


@dataclass(frozen=True)
class Job:
    """One kernel with the types of its arguments, for one target.

    arguments: "*fp32" or "i32"; with ":16" a pointer aligned to 16 bytes, or a
        number that is a multiple of 16.
    constants: values of constexpr arguments, and of those that Triton turns
        into constants (an integer 1, a None); {"dtype": "fp32"} is a type.
    options: num_warps, num_stages and so on.
    """

    lesson: str
    kernel: str
    target: str
    arguments: dict
    constants: dict = field(default_factory=dict)
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Of one thread: ``registers``, ``stack`` bytes, ``spills`` (instructions on
    NVIDIA, registers on AMD). Of one program: ``shared`` bytes. ``asm``: texts by
    name, among them ttgir, ptx and sass, or amdgcn.
    """

    registers: int
    spills: int
    stack: int
    shared: int
    asm: dict

    def widths(self, what: str) -> set[int]:
        """The bits that single instructions "load" from or "store" to global memory."""
        if "ptx" in self.asm:
            short = {"load": "ld", "store": "st"}[what]
            found = re.findall(rf"\b{short}\.global[\w.:]*?(?:\.v(\d))?\.b(\d+)", self.asm["ptx"])
            return {int(count or 1) * int(bits) for count, bits in found}
        sizes = {"byte": 8, "ubyte": 8, "short": 16, "ushort": 16, "dword": 32}
        found = re.findall(
            rf"\b(?:global|buffer|flat)_{what}_({'|'.join(sizes)})(?:x(\d))?", self.asm["amdgcn"]
        )
        return {sizes[size] * int(count or 1) for size, count in found}


def compile_kernels(jobs: list[Job]) -> list[Report]:
    """Compile in one child process. Raises RuntimeError where a job does not compile."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as folder:
        answers = Path(folder) / "reports.json"
        child = subprocess.run(
            [sys.executable, __file__, answers],
            input=json.dumps([vars(job) for job in jobs]),
            env=environment,
            capture_output=True,
            text=True,
        )
        if child.returncode:
            raise RuntimeError(child.stdout + child.stderr)
        reports = json.loads(answers.read_text("utf-8"))
    return [Report(**report) for report in reports]


def compile_kernel(job: Job) -> Report:
    return compile_kernels([job])[0]


def _compile(job: Job) -> Report:
    from lesson_code import load
    from triton.compiler import ASTSource
    from triton.compiler import compile as triton_compile
    from triton.language import dtype
    from triton.runtime.jit import JITFunction

    function = getattr(load(job.lesson), job.kernel)
    while not isinstance(function, JITFunction):
        function = function.fn  # under autotune or heuristics
    signature, attributes = {}, {}
    for position, name in enumerate(function.arg_names):
        if name in job.constants:
            signature[name] = "constexpr"
            continue
        signature[name], _, divisor = job.arguments[name].partition(":")
        if divisor:
            attributes[(position,)] = [["tt.divisibility", int(divisor)]]
    constants = {
        k: dtype(v["dtype"]) if isinstance(v, dict) else v for k, v in job.constants.items()
    }
    source = ASTSource(function, signature, constants, attributes)
    compiled = triton_compile(source, target=_gpu_target(job.target), options=job.options)
    asm = {name: text for name, text in compiled.asm.items() if isinstance(text, str)}
    shared = compiled.metadata.shared
    if "cubin" in compiled.asm:
        usage, asm["sass"] = _disassemble(compiled.asm["cubin"])
        registers, stack = (int(re.search(rf"{k}:(\d+)", usage)[1]) for k in ("REG", "STACK"))
        spills = len(re.findall(r"\b(?:STL|LDL)\b", asm["sass"]))
        return Report(registers, spills, stack, shared, asm)
    text = asm["amdgcn"]
    counts = (r"\.vgpr_count", r"\.vgpr_spill_count", r"\.private_segment_fixed_size")
    registers, spills, stack = (int(re.search(rf"{k}:\s*(\d+)", text)[1]) for k in counts)
    return Report(registers, spills, stack, shared, asm)


def _gpu_target(name: str):
    from triton.backends.compiler import GPUTarget

    if name.startswith("sm_"):
        return GPUTarget("cuda", int(name.removeprefix("sm_")), 32)
    return GPUTarget("hip", name, 64 if name.startswith("gfx9") else 32)


def _disassemble(cubin: bytes) -> tuple[str, str]:
    """Resource usage and SASS, from the tools in Triton's own wheel."""
    import triton

    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    commands = ("cuobjdump", "-res-usage"), ("nvdisasm", "-c")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        usage, sass = (
            subprocess.run(
                [tools / tool, option, file.name], capture_output=True, text=True, check=True
            ).stdout
            for tool, option in commands
        )
    return usage, sass


def _main(answers: str) -> None:
    reports = []
    for job in (Job(**job) for job in json.load(sys.stdin)):
        try:
            reports.append(vars(_compile(job)))
        except Exception as error:
            raise RuntimeError(f"{job} does not compile") from error
    Path(answers).write_text(json.dumps(reports), "utf-8")


if __name__ == "__main__":
    _main(sys.argv[1])
