"""The proofs on a GPU again, with fewer cases, under NVIDIA's compute-sanitizer.

    python tests/proofs/sanitize.py [lesson or operator ...]

writes what memcheck and racecheck found to _build/sanitizer.json. Each tensor is an allocation
of its own here, so that memcheck sees the first byte behind it.
"""

import concurrent.futures
import datetime
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "proofs"), str(ROOT / "docs" / "_ext")]

import lessons  # noqa: E402
import torch  # noqa: E402
from operators import OPERATORS  # noqa: E402

CASES = 20  # of each operator
TOOLS = {"memcheck": r"ERROR SUMMARY: (\d+) error", "racecheck": r"SUMMARY: (\d+) hazard"}
# One element too many is written; memcheck must notice.
CANARY = """import torch, triton, triton.language as tl
@triton.jit
def canary_kernel(x_ptr, n: tl.constexpr):
    tl.store(x_ptr + tl.arange(0, n), 1)
canary_kernel[(1,)](torch.empty(1023, dtype=torch.int8, device="cuda"), 1024)
torch.cuda.synchronize()
"""


def found(tool: str, *command: str) -> int:
    """How many errors or hazards the tool reports. Raises RuntimeError where it does not end."""
    environment = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PROOFS_CASES": str(CASES)}
    run = subprocess.run(
        ["compute-sanitizer", "--tool", tool, sys.executable, *command],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    counts = [int(count) for count in re.findall(TOOLS[tool], run.stdout)]
    if not counts or (run.returncode and not sum(counts)):
        raise RuntimeError(f"{tool} {command}: {run.stdout[-2000:]}{run.stderr[-2000:]}")
    return sum(counts)


def sanitize(name: str) -> dict:
    test = f"tests/proofs/test_operators.py::test_on_cuda[{name}-cuda]"
    options = ["-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", test]
    row = {"operator": name, "cases": CASES} | {tool: found(tool, *options) for tool in TOOLS}
    print(row, flush=True)
    return row | {"code": lessons.find()[OPERATORS[name].lesson].code_hash()}


def main(chosen: list[str]) -> int:
    with tempfile.TemporaryDirectory() as folder:
        canary = Path(folder, "canary.py")
        canary.write_text(CANARY, encoding="utf-8")
        if not found("memcheck", str(canary)):
            print("memcheck does not notice an element too many")
            return 1
    capability = torch.cuda.get_device_capability()
    able = {name: o for name, o in OPERATORS.items() if o.capability <= capability}
    names = [name for name, o in able.items() if not chosen or {name, o.lesson} & {*chosen}]
    path = ROOT / "_build" / "sanitizer.json"
    known = json.loads(path.read_text("utf-8"))["operators"] if path.exists() else []
    every = {row["operator"]: row for row in known}
    summary = {"date": datetime.date.today().isoformat(), "gpu": torch.cuda.get_device_name()}
    path.parent.mkdir(exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        for done in concurrent.futures.as_completed(pool.submit(sanitize, n) for n in names):
            every[done.result()["operator"]] = done.result()
            summary["operators"] = [every[name] for name in sorted(every)]
            path.write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    return int(any(every[name][tool] for name in names for tool in TOOLS))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
