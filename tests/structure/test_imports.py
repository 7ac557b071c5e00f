"""The order of the packages, read from their imports; and sizes of modules.

Imports inside functions and under TYPE_CHECKING count as well: they hide cycles.
"""

import ast
import importlib
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import retrax

ROOT = Path(retrax.__file__).parent
PATHS = sorted(ROOT.rglob("*.py"))
TREES = {path: ast.parse(path.read_text()) for path in PATHS}

# What the modules of each part may import, beside those of the same part.
GROUND = {"shapes", "trees", "errors"}
ALLOWED = {
    "errors": set(),
    "shapes": set(),
    "trees": set(),
    "storage": GROUND,
    "layers": GROUND | {"storage"},
    "models": GROUND | {"layers"},
    "optimizers": GROUND,
    "data": {"errors"},
    "trainer": GROUND | {"storage", "layers", "optimizers", "data"},
    "supervised": GROUND | {"layers", "models", "optimizers", "data", "trainer"},
}
TOP = {"cli", "command_line"}  # May import all.

# Imports against the order of modules, with the reason.
LOOKS_UP = {
    ("retrax.trainer.__main__", "retrax.cli"): "python -m retrax.trainer",
    ("retrax.layers.base", "retrax.layers.files"): "Layer.save_to_file, when called",
    ("retrax.layers.base", "retrax.layers.sequences"): "Layer.reset_state, when called",
    ("retrax.layers.base", "retrax.layers.summary"): "Layer.summary, when called",
}

MAX_LINES, MAX_FUNCTION_LINES = 400, 60
LONG_MODULES = {
    "layers/__init__.py": "the names of all layers, one a line, and nothing else",
    "layers/base.py": "Layer: what subclasses write, users call, and how it runs",
    "trainer/step.py": "gradient sources and the one update, read together",
    "trainer/step_trainer.py": "holding, lending and compiling of one carry",
    "trainer/trainer.py": "the names of Trax's Trainer, one short method each",
    "supervised/training.py": "the names of Trax's Loop, one short method each",
}


def module_name(path):
    parts = ["retrax", *path.relative_to(ROOT).with_suffix("").parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in PATHS}


def part_of(module):
    """'retrax.layers.base' -> 'layers'; '' for retrax itself."""
    return module.partition(".")[2].partition(".")[0]


def imports(path):
    """Yields (line, module) of all imports; 'from p import m' gives p.m if a module."""
    for node in ast.walk(TREES[path]):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield node.lineno, name if name in MODULES else node.module


def own_imports(path):
    return [(line, m) for line, m in imports(path) if m.split(".")[0] == "retrax"]


def test_the_parts_are_all_known():
    parts = {part_of(name) for name in MODULES} - {""}
    assert parts == set(ALLOWED) | TOP


# The top imports all; retrax/__init__ imports lazily.
@pytest.mark.parametrize("name", [m for m in MODULES if part_of(m) in ALLOWED])
def test_imports_go_one_way(name):
    part = part_of(name)
    for line, imported in own_imports(MODULES[name]):
        if (name, imported) in LOOKS_UP:
            continue
        allowed = ALLOWED[part] | {part}
        assert part_of(imported) in allowed, f"{name}:{line} imports {imported}"


def test_exceptions_to_the_order_are_still_needed():
    found = {(n, m) for n, path in MODULES.items() for _, m in own_imports(path)}
    assert set(LOOKS_UP) <= found


def test_data_knows_neither_jax_nor_layers():
    for name, path in MODULES.items():
        if part_of(name) == "data":
            roots = {m.split(".")[0] for _, m in imports(path)}
            assert not roots & {"jax", "jaxlib", "optax", "tensorflow"}, name


def test_no_import_cycle():
    edges = {}
    for name, path in MODULES.items():
        targets = {m for _, m in own_imports(path) if (name, m) not in LOOKS_UP}
        edges[name] = {m for m in targets if m in MODULES and m not in ("retrax", name)}
    done, active = set(), []

    def visit(name):
        if name in done:
            return
        assert name not in active, " -> ".join(active[active.index(name) :] + [name])
        active.append(name)
        for other in sorted(edges[name]):
            visit(other)
        active.pop()
        done.add(name)

    for name in sorted(edges):
        visit(name)


@pytest.mark.parametrize("name", MODULES)
def test_only_public_jax(name):
    for line, imported in imports(MODULES[name]):
        private = any(p.startswith("_") for p in imported.split(".")[1:])
        where = f"{name}:{line}"
        if imported.split(".")[0] in ("jax", "jaxlib", "optax", "gin"):
            assert not private, f"{where} imports {imported}"
    for node in ast.walk(TREES[MODULES[name]]):
        if isinstance(node, ast.Attribute) and node.attr == "_src":
            raise AssertionError(f"{name}:{node.lineno} uses _src")


@pytest.mark.parametrize("name", MODULES)
def test_no_assert_statements(name):
    """Mistakes raise errors that say what to change, also under `python -O`."""
    tree = TREES[MODULES[name]]
    lines = [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assert) and not narrows_type(node.test)
    ]
    assert not lines, f"assert in {name}, lines {lines}"


def narrows_type(test):
    """Whether this is 'x is not None', which type checkers need to be told."""
    return (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.IsNot)
        and ast.unparse(test.comparators[0]) == "None"
    )


@pytest.mark.parametrize("name", MODULES)
def test_modules_say_what_they_are_for(name):
    path = MODULES[name]
    assert ast.get_docstring(TREES[path]), f"{path} has no docstring"


def test_modules_are_short():
    long = {
        str(path.relative_to(ROOT))
        for path in PATHS
        if len(path.read_text().splitlines()) > MAX_LINES
    }
    assert long - set(LONG_MODULES) == set()
    assert all((ROOT / name).exists() for name in LONG_MODULES)


def functions(tree, prefix=""):
    for node in ast.iter_child_nodes(tree):
        name = prefix + getattr(node, "name", "")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield name, node
        if isinstance(node, ast.ClassDef):
            yield from functions(node, name + ".")


def body_lines(node):
    """Lines from the first statement on: neither arguments nor docstring."""
    has_docstring = ast.get_docstring(node) is not None
    body = node.body[1:] if has_docstring else node.body
    return (node.end_lineno or 0) - body[0].lineno + 1 if body else 0


def test_functions_are_short():
    lengths = {
        f"{path.relative_to(ROOT)}:{name}": body_lines(node)
        for path in PATHS
        for name, node in functions(TREES[path])
    }
    long = {name for name, n in lengths.items() if n > MAX_FUNCTION_LINES}
    assert long == set()


PACKAGES = ["retrax"] + [
    info.name
    for info in pkgutil.walk_packages(retrax.__path__, "retrax.")
    if info.ispkg
]


@pytest.mark.parametrize("name", PACKAGES)
def test_all_of_a_package_resolves(name):
    module = importlib.import_module(name)
    names = module.__all__
    assert len(names) == len(set(names))
    for public in names:
        assert getattr(module, public) is not None, f"{name}.{public}"


def test_gin_folder_is_no_package():
    assert not list((ROOT / "gin").glob("*.py"))


@pytest.mark.parametrize("statement", ["retrax", "retrax.trainer", "retrax.supervised"])
def test_import_loads_nothing_heavy(statement):
    heavy = ("tensorflow", "matplotlib", "tensorboardX", "torch", "sklearn")
    code = (
        f"import sys, {statement}\n"
        f"print([m for m in {heavy} if m in sys.modules])\n"
        "print(sorted(m for m in sys.modules if m.startswith('retrax.')))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    loaded_heavy, loaded_own = done.stdout.splitlines()
    assert loaded_heavy == "[]"
    if statement == "retrax":
        assert loaded_own == "[]"  # Subpackages are loaded when first used.
