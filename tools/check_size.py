"""Size check: each package of src, the tests, benchmarks and docs stay within the budgets of tools/budgets.toml.

Run by ``make check``, after the format check. Lines are those of Python files, words those of README.md and docs. A
change that raises a budget gives the reason in its commit message; one that saves lines lowers it.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = Path(__file__).with_name("budgets.toml")
Sizes = dict[str, dict[str, int]]


def _python(files: Iterable[Path]) -> dict[str, int]:
    texts = [file.read_text(encoding="utf-8") for file in files]
    return {"lines": sum(text.count("\n") for text in texts), "files": len(texts)}


def sizes(root: Path) -> Sizes:
    """Returns lines and files of each package and of src, tests and benchmarks, and the words of the docs."""
    package = root / "src" / "foretoken"
    result = {"modules": _python(package.glob("*.py"))}  # those in no package
    for folder in sorted(path for path in package.iterdir() if path.is_dir()):
        if (size := _python(folder.rglob("*.py")))["files"]:  # byte code may be left of a package that is gone
            result[folder.name] = size
    for name in ("src", "tests", "benchmarks"):
        result[name] = _python((root / name).rglob("*.py"))
    pages = [root / "README.md", *(root / "docs").rglob("*.md")]
    result["docs"] = {"words": sum(len(page.read_text(encoding="utf-8").split()) for page in pages)}
    return result


def over_budget(measured: Sizes, budgets: Sizes) -> list[str]:
    """Returns a line for each size above its budget and for each name that only one of the two has."""
    result = [f"{name}: no budget" for name in measured if name not in budgets]
    for name, budget in budgets.items():
        if name not in measured:
            result.append(f"{name}: a budget of nothing")
            continue
        for unit, limit in budget.items():
            if measured[name][unit] > limit:
                result.append(f"{name}: {measured[name][unit]:,} {unit}, budget {limit:,}")
    return result


if __name__ == "__main__":
    measured = sizes(ROOT)
    violations = over_budget(measured, tomllib.loads(BUDGETS.read_text(encoding="utf-8")))
    for name in measured if "--all" in sys.argv else ():
        print(f"{name:12}", *(f"{number:7,} {unit}" for unit, number in measured[name].items()))
    print("\n".join(violations) or f"size: within budget; src {measured['src']['lines']:,} lines")
    sys.exit(bool(violations))
