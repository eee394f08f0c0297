"""Who may know whom: no import cycle, no import upward, and no part that reaches into another or knows it by name.

The order of the packages is that of ARCHITECTURE.md, "Folders of the core, from the bottom up".
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = next(folder for folder in Path(__file__).resolve().parents if (folder / "ARCHITECTURE.md").exists())
#: Modules that only keep import paths of earlier versions, and the entry point.
BESIDE = {"__main__", "capture", "checkpoint", "container", "rng"}
POLICIES = {"Auto", "AutoTuner", "SwitchingCommunicator", "Kimad", "KimadPlus", "DensityController", "Fusion", "Capture"}
POLICIES |= {"ObserverDispatcher", "Timeline", "Writer", "BandwidthMonitor"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("grace_ext", *parts) if parts[0] == "adapters" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = {module_of(path): path for folder in ("grace_ext", "adapters") for path in (ROOT / folder).rglob("*.py")}
TREES = {module: ast.parse(path.read_text(encoding="utf-8")) for module, path in PATHS.items()}
CORE = [module for module in TREES if not module.startswith("grace_ext.adapters")]


def when_imported(nodes) -> Iterator[ast.AST]:
    """The nodes that run when the module is imported."""
    for node in nodes:
        if not isinstance(node, FUNCTIONS):
            yield node
            yield from when_imported(ast.iter_child_nodes(node))


def imports(module: str, nodes) -> set[str]:
    """The modules of ours that these nodes of a module import."""
    package = module if PATHS[module].name == "__init__.py" else module.rpartition(".")[0]
    found = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")[: len(package.split(".")) + 1 - node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            found |= {f"{base}.{alias.name}" if f"{base}.{alias.name}" in PATHS else base for alias in node.names}
    return found & PATHS.keys() - {module}


def cycle(graph: dict[str, set[str]]) -> list[str]:
    """Names of a cycle, or []."""
    left = dict(graph)
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    return sorted(left)


def part(module: str) -> str:
    """The package of the core, or the module beside the packages; "" for grace_ext itself."""
    return (module.split(".") + [""])[1]


def layers() -> dict[str, int]:
    """Each package's row in ARCHITECTURE.md."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    table = re.search(r"## Folders of the core, from the bottom up\n+((?:\|.*\n)+)", text).group(1)
    rows = [re.findall(r"`(\w+)(?:/|\.py)`", line.split("|")[1]) for line in table.splitlines()[2:]]
    return {name: number for number, row in enumerate(rows) for name in row}


def test_no_modules_import_each_other_in_a_circle():
    assert not cycle({module: imports(module, when_imported(tree.body)) for module, tree in TREES.items()})


def test_no_packages_import_each_other_in_a_circle():
    graph: dict[str, set[str]] = {}
    for module in CORE:
        graph.setdefault(part(module), set()).update(map(part, imports(module, ast.walk(TREES[module]))))
    assert not cycle({package: others - {package, ""} for package, others in graph.items() if package})


def test_no_import_runs_upward():
    order, upward = layers(), []
    for module in CORE:
        own = part(module)
        others = {part(other) for other in imports(module, ast.walk(TREES[module]))} - {own, ""}
        if own and own not in BESIDE:
            upward += [f"{module} -> {other}" for other in others if order.get(other, len(order)) > order[own]]
    assert not upward


def test_architecture_lists_the_packages():
    assert layers().keys() == {part(module) for module in CORE} - BESIDE - {""}


def test_files_are_short():
    lines = {module: len(path.read_text(encoding="utf-8").splitlines()) for module, path in PATHS.items()}
    assert lines["grace_ext.exchange.engine"] <= 250
    assert not {module: count for module, count in lines.items() if count > 350}


def test_the_engine_knows_no_policy_by_name():
    known = {
        node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else node.value
        for name in ("engine", "scheduler", "eager_decoder", "buckets", "shadow", "state", "stats", "gradient_count")
        for node in ast.walk(TREES[f"grace_ext.exchange.{name}"])
        if isinstance(node, ast.Name | ast.Attribute | ast.Constant)
    }
    assert not known & (POLICIES | {"auto", "kimad", "kimad+"}) - {"Capture"}  # an argument's type


def test_nobody_asks_for_the_class_of_a_policy_or_a_handle():
    kinds = POLICIES - {"Capture", "Timeline", "Writer"} | {"CollectiveHandle", "Communicator", "Pending", "BypassPending"}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
                asked = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
                asked |= {one.attr for one in ast.walk(node) if isinstance(one, ast.Attribute)}
                assert not asked & kinds, f"{module}:{node.lineno}"


def test_nobody_probes_handles_pending_buckets_or_communicators():
    subject = re.compile(r"(handle|pending|bucket|communicator|listener|transport|future\.result\(\))$")
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("getattr", "hasattr") and node.args:
                assert not subject.search(ast.unparse(node.args[0]).rstrip("_")) or module == "grace_ext.transport.base", (
                    f"{module}:{node.lineno}"
                )


def test_what_waits_for_a_collective_is_a_collective_handle():
    handles = {}
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and {"wait", "poll"} <= {getattr(one, "name", None) for one in node.body}:
                handles[node.name] = module
    assert handles == {"CollectiveHandle": "grace_ext.transport.base"}


def test_nobody_reaches_into_the_private_fields_of_another_part():
    reached = {field for module in CORE for field in foreign_private_fields(TREES[module])}
    assert reached == {"os._exit", "threading._register_atexit"}


def foreign_private_fields(tree: ast.AST) -> set[str]:
    """Those that no class or function of the module defines."""
    own, attributes = set(), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            attributes.append((node.attr, ast.unparse(node.value)))
        elif isinstance(node, ast.AnnAssign):
            own.add(ast.unparse(node.target))
        elif isinstance(node, ast.Assign):
            own.update(map(ast.unparse, node.targets))
        elif isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            own.add(node.name)
    own |= {name for name, owner in attributes if owner == "self"}
    return {
        f"{owner}.{name}"
        for name, owner in attributes
        if re.match(r"_[^_]", name) and name not in own and owner not in ("self", "cls", "super()")
    }
