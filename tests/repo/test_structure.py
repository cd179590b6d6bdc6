"""The order of the packages: imports only go down, and functions stay short."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "python/mlx_h2o"
LONGEST_FUNCTION = 60

# From the ground up; a module may import those of its own package and of the packages below,
# without a circle.
PACKAGES = """_install _checks _byte_size _files _progress _blas loading slots spill policies
    budgets attention layer hosts caches calibration models compression chat evaluate doctor
    serve __init__ cli __main__""".split()
FLOOR_OF = {name: i for i, name in enumerate(PACKAGES)}
# Files that import the package's modules inside functions: what may be missing (the extension and
# what stands on it), is chosen at run time, or takes long to load. Others do so at their top.
LATE = {
    "__init__.py",
    "attention/backends/choice.py",
    "attention/backends/cpu.py",
    "cli/__init__.py",
    "cli/serve.py",
    "attention/tracing.py",
}
# Optional mechanisms, which any file imports where they are first needed.
OPTIONAL = {
    "mlx_h2o.attention.backends.joined",
    "mlx_h2o.attention.backends.self_check",
    "mlx_h2o.attention.backends.self_check_variants",
    "mlx_h2o.caches.batch",
    "mlx_h2o.caches.latent",
    "mlx_h2o.caches.plain_rows",
    "mlx_h2o.caches.shared",
    "mlx_h2o.calibration.first_use",
    "mlx_h2o.hosts.rope_probe",
    "mlx_h2o.layer.fused_case",
    "mlx_h2o.layer.return_state",
    "mlx_h2o.layer.returning",
    "mlx_h2o.slots.recent_window",
    "mlx_h2o.slots.rope",
    "mlx_h2o.spill.layer_rows",
    "mlx_h2o.spill.row_file",
}
EXTENSIONS = ("_ext",)
FILES = {str(path.relative_to(PACKAGE)): path for path in sorted(PACKAGE.rglob("*.py"))}


def module_of(file: str) -> str:
    """ "attention/backends/cpu.py" -> "mlx_h2o.attention.backends.cpu"."""
    return ".".join(["mlx_h2o", *Path(file).with_suffix("").parts]).removesuffix(".__init__")


MODULES = {module_of(file): file for file in FILES}


def imported(tree: ast.AST) -> Iterator[str]:
    """Modules of the package that a syntax tree imports, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.startswith("mlx_h2o"))
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            if node.module and node.module.split(".")[0] == "mlx_h2o":
                for alias in node.names:
                    name = f"{node.module}.{alias.name}"
                    known = name in MODULES or alias.name in EXTENSIONS
                    yield name if known else node.module


def is_extension(module: str) -> bool:
    """Whether it is compiled: it may be missing, and imports nothing of the package."""
    return module.rpartition(".")[2] in EXTENSIONS


def floor_of(module: str) -> int:
    """How high the package of a module stands."""
    parts = module.split(".")
    return FLOOR_OF[parts[1] if len(parts) > 1 else "__init__"]


@cache
def trees() -> list[tuple[str, ast.Module]]:
    """All files with their syntax trees."""
    return [(file, ast.parse(path.read_text(encoding="utf-8"))) for file, path in FILES.items()]


def test_every_module_is_in_a_package():
    tops = {module.split(".")[1] for module in MODULES if "." in module}
    assert tops | {"__init__"} == set(FLOOR_OF)


def test_nothing_is_imported_from_above():
    upward = [
        f"{module_of(file)} imports {name}"
        for file, tree in trees()
        for name in imported(tree)
        if not is_extension(name) and floor_of(name) > floor_of(module_of(file))
    ]
    assert upward == []


def test_no_circle_of_imports():
    below = {module_of(file): set(imported(tree)) & MODULES.keys() for file, tree in trees()}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for other in sorted(below[module] - {"mlx_h2o"}):
                visit(other, (*path, module))
            done.add(module)

    for module in below:
        visit(module, ())
    assert done == MODULES.keys()


def test_imports_are_at_the_top_of_files():
    """Inside a function one would hide from a reader what the file stands on."""
    late = {}
    for file, tree in trees():
        top = {name for node in tree.body for name in imported(node) if _is_import(node)}
        inner = {name for name in set(imported(tree)) - top - OPTIONAL if not is_extension(name)}
        if inner:
            late[file] = inner
    assert late.keys() - LATE == set(), late


def test_optional_mechanisms_are_imported_where_they_are_needed():
    program = "import sys, mlx_h2o; mlx_h2o.make_prompt_cache; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    modules = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert OPTIONAL & MODULES.keys() == OPTIONAL
    assert "mlx_h2o.models.make" in modules
    assert not OPTIONAL & set(modules)


def _is_import(node: ast.AST) -> bool:
    return isinstance(node, ast.Import | ast.ImportFrom)


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """All functions with their files."""
    for file, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield file, node


def test_no_function_is_too_long():
    long = [
        f"{file}: {node.name} has {length} lines"
        for file, node in functions()
        if (length := node.end_lineno - node.lineno + 1) > LONGEST_FUNCTION
    ]
    assert long == []


SECTION = re.compile(r"^(?:Args|Attributes):\n((?:    .*\n|\n)*)", re.MULTILINE)
CLIPPED = re.compile(
    r"^    [\w, ]+: +(?:(?:Of|That|Whose|Which)|(?:In|By|At|For) which)\b.*", re.MULTILINE
)


def test_entries_say_what_the_thing_is():
    """`settings: Of the layer.` leaves the noun to the reader: `settings: The layer's settings.`"""
    clipped = [
        f"{file}: {entry.strip()}"
        for file, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        for section in SECTION.findall(f"{ast.get_docstring(node)}\n")
        for entry in CLIPPED.findall(section)
    ]
    assert clipped == []


# A docstring that says where the arguments are explained.
REFERS = re.compile(r"\b([Aa]s in|As mlx-lm|[Ss]ee|[Aa]rguments)\b")


def test_public_functions_of_three_arguments_explain_them():
    silent = [
        f"{file}: {node.name}"
        for file, node in functions()
        if not node.name.startswith("_")
        and len(arguments(node)) >= 3
        and (text := ast.get_docstring(node))  # what overrides another has none
        and "Args:" not in text
        and not REFERS.search(text)
    ]
    assert silent == []


def arguments(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """The names of a function's arguments, without self and cls."""
    every = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
    return [one.arg for one in every if one.arg not in ("self", "cls")]


def test_private_state_is_read_by_its_own_file_only():
    """`other._field` of a class in another file would tie the two together out of sight."""
    read = []
    for file, tree in trees():
        own = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node.value) in ("self", "cls"):
                own.add(node.attr)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and _is_private(node.attr):
                known = ast.unparse(node.value) in ("argparse", "os", "mlx_h2o")
                foreign = node.attr not in own and not known
                read += [f"{file}: {ast.unparse(node)}"] if foreign else []
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("mlx_h2o"):
                names = [alias.name for alias in node.names if _is_private(alias.name)]
                names = [name for name in names if f"{name}.py" not in FILES]
                read += [f"{file}: import {name}" for name in names]
    assert read == []


def _is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name not in EXTENSIONS
