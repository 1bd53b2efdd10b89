"""Which module may import which: config -> plan -> module -> kernels, and leaves that nothing imports."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import torchrec_triton

ROOT = Path(torchrec_triton.__file__).parent
PACKAGE = "torchrec_triton"

# Part of the package -> parts that it may import (besides itself), and packages that it may not.
# _compat probes the packages beneath and imports nothing of this one, so any part may ask it.
MAY_IMPORT = {
    "_compat": set(),
    "config": set(),
    "support": set(),
    "plan": {"config", "support", "_compat"},
    "kernels": {"_compat"},
    "module": {"plan", "support", "config", "kernels", "_compat"},
    "__init__": {"_compat"},
}
LEAVES = {"cli", "doctor", "components", "ab", "bench", "__main__"}
MAY_NOT_KNOW = {
    "_compat": {"torch", "triton", "torchrec", "fbgemm_gpu"},
    "config": {"torch", "triton", "torchrec"},
    "support": {"torch", "triton", "torchrec", "fbgemm_gpu"},
    "kernels": {"torchrec", "fbgemm_gpu"},
    "plan": {"triton", "fbgemm_gpu"},
    "module/tbe.py": {"torchrec", "triton"},
    "__init__": {"torch", "triton", "torchrec", "fbgemm_gpu"},
}
FILES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imported(path: Path) -> set[str]:
    """Dotted names that a file imports at run time, relative imports made absolute."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
        for node in ast.walk(block)
    }
    names: set[str] = set()
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = [PACKAGE, *path.relative_to(ROOT).parts[:-1]]
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            names.update(f"{module}.{alias.name}" for alias in node.names)
    return names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_direction(path: Path) -> None:
    part, names = part_of(path), imported(path)
    ours = {name.split(".")[1] for name in names if name.startswith(f"{PACKAGE}.")} - {part}
    ours = {name for name in ours if (ROOT / name).is_dir() or (ROOT / f"{name}.py").exists()}
    if part in LEAVES:
        allowed = {p for p in MAY_IMPORT if p != "__init__"} | (LEAVES if part in ("cli", "__main__") else set())
    else:
        allowed = MAY_IMPORT[part]  # a new part has to be placed here first
    assert ours <= allowed, f"{part} imports {sorted(ours - allowed)}; allowed: {sorted(allowed)}"
    forbidden = MAY_NOT_KNOW.get(part, set()) | MAY_NOT_KNOW.get(str(path.relative_to(ROOT)), set())
    assert not {name.split(".")[0] for name in names} & forbidden


def test_no_module_shadows_a_package() -> None:
    """A folder named like a dependency hides it from a script that is run beside it."""
    assert not [path for path in ROOT.rglob("*") if path.stem in ("torch", "triton", "torchrec", "fbgemm_gpu", "numpy")]


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, torchrec_triton;"
        "print([n for n in ('torch', 'triton', 'torchrec', 'fbgemm_gpu') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent)
    assert done.stdout.strip() == "[]"
