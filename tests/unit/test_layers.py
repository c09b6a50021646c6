"""Who may import whom, read from the code: `ARCHITECTURE.md` shows the same layers."""

import ast
import re
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import flatout

ROOT = Path(flatout.__file__).parent
# From the bottom to the top: a module imports from its own entry and from those to the left of it.
LAYERS = (
    *("utils", "config", "data", "tasks", "models", "distributed", "engine", "report"),
    *("inference", "train", "analysis", "cli", "__main__"),
)
# Libraries that only some folders may use.
RESTRICTED = {
    "torch.cuda": ("engine",),
    "torch.distributed": ("engine", "distributed"),
    "jax": ("engine/xla", "analysis"),
    "jaxlib": ("engine/xla", "analysis"),
    "torchax": ("engine/xla", "analysis"),
}
DEVICE_WORDS = re.compile(r"\b(cuda|cpus?|mps|xla|tpus?|gpus?)\b", re.IGNORECASE)


def files(folder: str = ".") -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_of(path): path for path in files()}


@cache
def tree_of(path: Path) -> ast.Module:
    """Return the syntax tree, without what is imported for type checking alone."""

    class Runtime(ast.NodeTransformer):
        def visit_If(self, node: ast.If) -> ast.AST | list[ast.stmt]:
            return node.orelse if ast.unparse(node.test) == "TYPE_CHECKING" else self.generic_visit(node)

    return Runtime().visit(ast.parse(path.read_text(encoding="utf-8")))


@cache
def imports(path: Path) -> frozenset[str]:
    """Return the dotted names that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(names)


def own_imports(path: Path) -> set[str]:
    """Return the modules of flatout that a file imports."""
    found = set()
    for name in imports(path):
        while name and name not in MODULES:
            name = name.rpartition(".")[0]
        if name not in ("", "flatout", module_of(path)):
            found.add(name)
    return found


def layer_of(module: str) -> int:
    return LAYERS.index(module.split(".")[1])


def test_every_folder_and_module_has_a_layer() -> None:
    top = {path.stem for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert top - {"__init__"} == set(LAYERS)
    assert len(LAYERS) - 1 <= 12


def test_imports_point_downwards() -> None:
    modules = [module for module in MODULES if module != "flatout"]
    above = [(m, name) for m in modules for name in own_imports(MODULES[m]) if layer_of(name) > layer_of(m)]
    assert not above


def test_there_is_no_import_cycle() -> None:
    # CycleError names the modules.
    TopologicalSorter({module: own_imports(path) for module, path in MODULES.items()}).prepare()


def test_libraries_are_used_in_their_folders_alone() -> None:
    for path in files():
        used = {ast.unparse(node) for node in ast.walk(tree_of(path)) if isinstance(node, ast.Attribute)}
        for library, folders in RESTRICTED.items():
            if not any(path.is_relative_to(ROOT / folder) for folder in folders):
                users = [name for name in imports(path) | used if f"{name}.".startswith(f"{library}.")]
                assert not users, path


def test_the_engine_does_not_start_processes() -> None:
    for path in (*files("engine/torch"), *files("engine/xla")):
        assert not own_imports(path) & {"flatout.distributed.launch", "flatout.engine.factory"}, path


def test_the_loop_knows_no_device() -> None:
    text = (ROOT / "train" / "loop.py").read_text(encoding="utf-8")
    assert not DEVICE_WORDS.findall(text)
    assert not [name for name in imports(ROOT / "train" / "loop.py") if name.startswith("torch")]
