"""Pages of the API reference: one for every public module, from its `__all__`, read and not imported."""

from __future__ import annotations

import ast
from pathlib import Path

SKIPPED = ("stability", "report")
"""Modules that only forward names of version 0.1."""


def reference_pages(package: Path) -> dict[str, str]:
    """File name → page, for `normlab` and its modules with public names."""
    modules = public_modules(package)
    pages = {f"{module}.md": _page(module, names, lines) for module, (names, lines) in modules.items() if names}
    rows = [
        f"| [`{module}`]({module}.md) | {first} |" for module, (_, first) in modules.items() if f"{module}.md" in pages
    ]
    table = "\n".join(["| module | what it is |", "|---|---|", *rows])
    pages["index.md"] = (
        "# Python API\n\nNames that may be imported; everything else may change without notice. "
        "Commands are described by `normlab COMMAND --help`.\n\n" + table + "\n"
    )
    return pages


def public_modules(package: Path) -> dict[str, tuple[list[str], str]]:
    """Module → its public names that are not modules themselves, and the first line of its docstring."""
    found: dict[str, tuple[list[str], str]] = {}
    paths = [package / "__init__.py", *sorted(package.glob("*.py")), *sorted(package.glob("*/__init__.py"))]
    for path in paths:
        module = _module_name(package, path)
        tree = ast.parse(path.read_text("utf-8"))
        names = exported(tree)
        if names and module not in found and module.rpartition(".")[2] not in SKIPPED:
            first = (ast.get_docstring(tree) or "").partition("\n")[0]
            found[module] = ([name for name in names if not _is_module(package, path, name)], first)
    return found


def exported(tree: ast.Module) -> list[str]:
    """What a module lists in `__all__`."""
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and [ast.unparse(target) for target in statement.targets] == ["__all__"]:
            return list(ast.literal_eval(statement.value))
    return []


def _is_module(package: Path, path: Path, name: str) -> bool:
    """Whether a name of a package's `__all__` is a module, which has a page of its own."""
    beside = path.parent / name
    return (
        path.name == "__init__.py"
        and path.parent == package
        and (beside.is_dir() or beside.with_suffix(".py").exists())
    )


def _module_name(package: Path, path: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _page(module: str, names: list[str], first: str) -> str:
    parts = [f"# {module}", first, *(f"::: {module}.{name}" for name in names)]
    return "\n\n".join(parts) + "\n"
