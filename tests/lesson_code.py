"""A lesson's kernels, wrappers and references, loaded without running the lesson."""

import ast
import functools
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)


def find(examples: Path = EXAMPLES) -> dict[str, Path]:
    """The lessons by stem, which is the file name without its number."""
    paths = sorted(examples.glob("[0-9]_*/[0-9][0-9]_*.py"))
    return {path.stem.split("_", 1)[1]: path for path in paths}


@functools.cache
def load(stem: str) -> ModuleType:
    """Functions, classes, imports and UPPER_CASE constants of a lesson, as a module.

    So too of an exercise's solution, in tests/exercises.
    The caller has chosen the mode: kernels are interpreted if TRITON_INTERPRET=1
    stood in the environment before the first import of Triton, else compiled.
    """
    path = find().get(stem) or Path(__file__).parent / "exercises" / f"{stem}.py"
    tree = ast.parse(path.read_text("utf-8"))
    tree.body = [node for node in tree.body if _is_kept(node)]
    module = ModuleType(f"lesson_{stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module
    # Under the real path, Triton finds the source of each kernel there.
    exec(compile(tree, path, "exec"), module.__dict__)
    return module


# (lesson, function) of @triton.jit functions that only kernels call
HELPERS = {("softmax", "shifted_exp"), ("gemm_fast", "tile_of")}
HELPERS |= {("attention", name) for name in ("add_scores", "store_rows", "hide", "correct")}
HELPERS |= {("autograd", "add_to")}
HELPERS |= {("attention_backward", "tile"), ("attention_backward", "put")}


def kernels(stem: str) -> list[str]:
    """The names of a lesson's ``@triton.jit`` functions, without helpers."""
    tree = ast.parse(find()[stem].read_text("utf-8"))
    functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    jitted = [f.name for f in functions if "triton.jit" in map(ast.unparse, f.decorator_list)]
    return [name for name in jitted if (stem, name) not in HELPERS]


def last_words(code: str, *flags: str) -> str:
    """The last line on stderr of a new Python that runs the code without the interpreter."""
    child = subprocess.run(
        [sys.executable, *flags, "-c", code],
        cwd=Path(__file__).parent,
        env={k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"},
        capture_output=True,
        text=True,
    )
    return child.stderr.splitlines()[-1]


def _is_kept(node: ast.stmt) -> bool:
    if isinstance(node, ast.Assign):
        targets = node.targets
    elif isinstance(node, (ast.AnnAssign, ast.AugAssign)):
        targets = [node.target]
    else:
        return isinstance(node, DEFINITIONS)
    flat = [part for t in targets for part in (t.elts if isinstance(t, ast.Tuple) else [t])]
    return all(isinstance(part, ast.Name) and part.id.isupper() for part in flat)
