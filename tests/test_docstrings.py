"""Docstrings of everything public have one form: a summary, Args, Returns, Raises, as docs/ shows them.

Public are the names without an underscore, in modules without one. Kernels are not: they have their shapes in a line or two.
A method that overrides a documented one may leave its docstring to that one.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Source|Example):$", re.M)
ENTRY = re.compile(r"^    (\*{0,2}\w+)(?: \([^)]*\))?: \S", re.M)
Function = ast.FunctionDef | ast.AsyncFunctionDef


def modules() -> list[Path]:
    found = [path for folder in ("grace_ext", "adapters") for path in (ROOT / folder).rglob("*.py")]
    names = [path.relative_to(ROOT).with_suffix("").parts for path in found]
    return sorted(
        path
        for path, parts in zip(found, names, strict=True)
        if "kernels" not in parts and not any(part.startswith("_") and part != "__init__" for part in parts)
    )


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in modules()}
CLASSES = {node.name: node for tree in TREES.values() for node in tree.body if isinstance(node, ast.ClassDef)}


def sections(docstring: str) -> dict[str, str]:
    """The text of each section, by its name."""
    parts = SECTION.split(docstring)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def arguments(function: Function) -> list[str]:
    spec = function.args
    names = [arg.arg for arg in (*spec.posonlyargs, *spec.args)]
    names += [f"*{spec.vararg.arg}"] if spec.vararg else []
    names += [arg.arg for arg in spec.kwonlyargs]
    names += [f"**{spec.kwarg.arg}"] if spec.kwarg else []
    return [name for name in names if name not in ("self", "cls") and not name.startswith("_")]


def own_nodes(function: Function) -> Iterator[ast.AST]:
    """The nodes of a function's body, without those of functions and classes in it."""
    left: list[ast.AST] = list(function.body)
    while left:
        node = left.pop()
        yield node
        if not isinstance(node, (*Function.__args__, ast.ClassDef, ast.Lambda)):
            left += ast.iter_child_nodes(node)


def decorators(node: Function | ast.ClassDef) -> set[str]:
    """Their last names: "setter" for @rate.setter, "dataclass" for @dataclasses.dataclass(frozen=True)."""
    return {ast.unparse(decorator).partition("(")[0].rpartition(".")[2] for decorator in node.decorator_list}


def overrides(method: str, of: ast.ClassDef) -> bool:
    """Whether a class above has a documented method of this name; one that is not ours is taken to have."""
    for base in of.bases:
        name = re.sub(r"\[.*", "", ast.unparse(base)).rpartition(".")[2]
        if name in ("Protocol", "NamedTuple", "ABC", "Generic", "object"):
            continue
        above = CLASSES.get(name)
        if above is None:
            return True
        if any(isinstance(node, Function) and node.name == method and ast.get_docstring(node) for node in above.body):
            return True
        if overrides(method, above):
            return True
    return False


def faults_of_function(function: Function, name: str) -> Iterator[str]:
    docstring = ast.get_docstring(function)
    if not docstring:
        yield f"{name}: no docstring"
        return
    found = sections(docstring)
    yield from faults_of_summary(docstring, name)
    if decorators(function) & {"property", "cached_property", "setter"}:
        return
    yield from faults_of_entries(found.get("Args"), arguments(function), name)
    nodes = list(own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        if "Yields" not in found:
            yield f"{name}: no Yields"
    elif any(isinstance(node, ast.Return) and node.value is not None for node in nodes) and not (
        isinstance(function.returns, ast.Constant) and function.returns.value is None
    ):
        if "Returns" not in found:
            yield f"{name}: no Returns"
    raised = {ast.unparse(node.exc).partition("(")[0] for node in nodes if isinstance(node, ast.Raise) and node.exc}
    for error in sorted(raised):
        if re.fullmatch(r"\w+Error", error) and error != "NotImplementedError" and error not in found.get("Raises", ""):
            yield f"{name}: no Raises for {error}"


def faults_of_entries(section: str | None, names: list[str], name: str) -> Iterator[str]:
    listed = ENTRY.findall(section or "")
    if listed != names:
        yield f"{name}: Args lists {listed}, not {names}"


def faults_of_summary(docstring: str, name: str) -> Iterator[str]:
    lines = docstring.splitlines()
    if not lines[0].endswith((".", "?", ":")):
        yield f"{name}: the summary is not one line that ends with a full stop"
    if len(lines) > 1 and lines[1]:
        yield f"{name}: no blank line after the summary"


def faults_of_class(node: ast.ClassDef) -> Iterator[str]:
    docstring = ast.get_docstring(node)
    if not docstring:
        yield f"{node.name}: no docstring"
        return
    yield from faults_of_summary(docstring, node.name)
    constructor = next((one for one in node.body if isinstance(one, Function) and one.name == "__init__"), None)
    is_record = decorators(node) & {"dataclass"} or any(ast.unparse(base).endswith("NamedTuple") for base in node.bases)
    if constructor is not None:
        own = sections(ast.get_docstring(constructor) or "") or sections(docstring)
        yield from faults_of_entries(own.get("Args"), arguments(constructor), f"{node.name}.__init__")
    elif is_record:
        fields = [
            one.target.id
            for one in node.body
            if isinstance(one, ast.AnnAssign)
            and isinstance(one.target, ast.Name)
            and not one.target.id.startswith("_")
            and "ClassVar" not in ast.unparse(one.annotation)
        ]
        found = sections(docstring)
        yield from faults_of_entries(found.get("Attributes") or found.get("Args"), fields, node.name)
    for one in node.body:
        if isinstance(one, Function) and not one.name.startswith("_"):
            if overrides(one.name, node) and not sections(ast.get_docstring(one) or ""):
                continue
            yield from faults_of_function(one, f"{node.name}.{one.name}")


def faults(path: Path) -> list[str]:
    found = [] if ast.get_docstring(TREES[path]) else ["the module: no docstring"]
    for node in TREES[path].body:
        if isinstance(node, Function) and not node.name.startswith("_"):
            found += faults_of_function(node, node.name)
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            found += faults_of_class(node)
    return found


@pytest.mark.parametrize("path", TREES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_docstrings_have_the_one_form(path):
    assert not faults(path), "\n".join(faults(path))
