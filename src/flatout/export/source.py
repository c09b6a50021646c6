"""Python source that stands alone: definitions of flatout's with all that they use of flatout's other modules."""

import ast
import importlib
import inspect
from types import ModuleType
from typing import Any


def closure(*roots: Any) -> tuple[set[str], str]:
    """Return imports, and definitions, each after those that it uses, of some classes and functions.

    What a definition uses of the standard library and other packages is imported as it is in its module. Imports for
    type checking alone are left out: such types are in quotes.

    Args:
        roots: classes and functions at the top of modules of flatout.
    """
    found = _Closure()
    for root in roots:
        found.add(inspect.getmodule(root), root.__name__)  # pyright: ignore[reportArgumentType]
    return found.imports, "\n\n\n".join(found.definitions)


class _Closure:
    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self._seen: set[tuple[str, object]] = set()

    def add(self, module: ModuleType, name: str) -> None:
        """Add what a name stands for in a module, after all that it uses itself."""
        if not self._is_new(module, name):
            return
        text = inspect.getsource(module)
        tree = ast.parse(text)
        imported = _imported(tree, name)
        if imported is not None:
            self._add_import(*imported)
            return
        for node in tree.body:
            if name in _defined(node) and self._is_new(module, node.lineno):
                inner = {alias.asname or alias.name for n in ast.walk(node) if _is_import(n) for alias in n.names}  # pyright: ignore
                for used in _names(node):
                    if used not in inner and used != name:
                        self.add(module, used)
                self.definitions.append(_text(text, node))
                return

    def _is_new(self, module: ModuleType, key: object) -> bool:
        """Whether a name, or the statement of a line, is met for the first time."""
        place = (module.__name__, key)
        is_new = place not in self._seen
        self._seen.add(place)
        return is_new

    def _add_import(self, source: str, original: str, name: str) -> None:
        if not source.startswith("flatout"):
            start = f"from {source} " if source else ""
            self.imports.add(f"{start}import {original}" + (f" as {name}" if name != original else ""))
        else:
            assert name == original, f"{source}.{original} as {name}: definitions keep their names"
            self.add(importlib.import_module(source), name)


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def _imported(tree: ast.Module, name: str) -> tuple[str, str, str] | None:
    """Return the module, the name in it and the local name of what a module imports at its top; else None."""
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            for alias in node.names:
                if (alias.asname or alias.name.partition(".")[0]) == name:
                    return (node.module or "" if isinstance(node, ast.ImportFrom) else ""), alias.name, name
    return None


def _defined(node: ast.stmt) -> set[str]:
    """Return the names that a statement at the top of a module gives something."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return {node.name}
    if isinstance(node, ast.Assign | ast.AnnAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return {n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)}
    return set()


def _names(node: ast.AST) -> list[str]:
    """Return the names that a statement reads, in their order."""
    return list(dict.fromkeys(n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)))


def _text(text: str, node: ast.stmt) -> str:
    """Return the source of a statement, with decorators."""
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    return "\n".join(text.splitlines()[first - 1 : node.end_lineno])
