"""Checks who imports whom, by reading the source (nothing is executed).

    services.X             latentpool (not its command line), kernels, services.X
    kernels                kernels
    latentpool.cli         anything
    latentpool (the rest)  latentpool (not its command line)

and kernels import no gRPC. Imports inside functions and under TYPE_CHECKING count too. Prints each breach; exits 1 if any.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
OURS = ("latentpool", "services", "kernels")


def room(module: str) -> str:
    """The part of the project that a module belongs to: services.router, latentpool.cli, latentpool, kernels."""
    parts = module.split(".")
    if parts[0] == "services" or parts[:2] == ["latentpool", "cli"]:
        return ".".join(parts[:2])
    return parts[0]


def allowed(importer: str, imported: str) -> bool:
    """Whether code in the room `importer` may import from the room `imported`."""
    if importer == "latentpool.cli" or importer == imported:
        return True
    if importer.startswith("services"):
        return imported in ("latentpool", "kernels", "services")
    return False


def imports(tree: ast.AST, package: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module) of every import; `from a import b` gives a.b, which is right for rooms either way."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            for alias in node.names:
                yield node.lineno, f"{base}.{alias.name}"


def breaches(root: Path) -> Iterator[str]:
    for file in sorted(path for name in OURS for path in (root / name).rglob("*.py")):
        parts = file.relative_to(root).with_suffix("").parts
        module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        importer = room(module)
        for line, imported in imports(ast.parse(file.read_text(encoding="utf-8"), str(file)), ".".join(parts[:-1])):
            top = imported.split(".")[0]
            grpc = importer == "kernels" and top.startswith("grpc")
            if grpc or (top in OURS and not allowed(importer, room(imported))):
                yield f"{file.relative_to(root)}:{line}: {importer} must not import {imported}"


def main() -> int:
    found = list(breaches(ROOT))
    print("\n".join(found) if found else "imports follow the rule")
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
