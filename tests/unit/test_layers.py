"""Who may import whom: read from the code, so that the layout stays what the documents say."""

import ast
from pathlib import Path

import flatout

ROOT = Path(flatout.__file__).parent


def imports(path: Path) -> set[str]:
    """Return the dotted names that a file imports, wherever in it, for type checking alone excepted."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    checking = [n for n in ast.walk(tree) if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    skipped = {id(inner) for node in checking for inner in ast.walk(node)}
    names = set()
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {node.module or ""} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def files(*folders: str) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def test_data_models_and_numerics_do_not_know_engines() -> None:
    for path in files("data", "models", "report", "numerics"):
        assert not [name for name in imports(path) if name.startswith("flatout.engine")], path


def test_the_loop_knows_no_device() -> None:
    text = (ROOT / "run" / "loop.py").read_text(encoding="utf-8")
    assert "torch" not in imports(ROOT / "run" / "loop.py")
    assert not [word for word in ("cuda", "cpu", "mps", "xla", "tpu") if word in text.lower()]
    assert len(text.splitlines()) < 200


def test_devices_are_named_in_engines_alone() -> None:
    for path in files("."):
        if path.is_relative_to(ROOT / "engine") or path.is_relative_to(ROOT / "dist"):
            continue
        text = path.read_text(encoding="utf-8")
        assert "torch.cuda" not in text, path
        assert "torch.distributed" not in text or path in files("dist"), path


def test_jax_is_in_its_engine_alone() -> None:
    own = files("engine/xla", "plan")
    for path in (p for p in files(".") if p not in own):
        assert not [name for name in imports(path) if name.split(".")[0] in ("jax", "torchax", "optax")], path


def test_packages_import_downwards_only() -> None:
    lower = [ROOT / f"{name}.py" for name in ("errors", "recipe", "files", "settings", "console")]
    tops = ("run", "plan", "scale", "cli", "commands", "parser")
    for path in (*files("data", "models", "report", "engine", "numerics"), *lower):
        upwards = [name for name in imports(path) if name.startswith(tuple(f"flatout.{top}" for top in tops))]
        assert not upwards, (path, upwards)
