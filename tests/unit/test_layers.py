"""The layer table of ARCHITECTURE.md, as data: which module may import which."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "ddp_lab"

# Module or package prefix -> (column, level). The longest matching prefix counts. A module imports from its own
# package's level and below in its own column, and from the shared column.
LAYERS: dict[str, tuple[str, int]] = {
    "": ("any", 0),
    "errors": ("shared", 0),
    "events": ("shared", 0),
    "faults": ("shared", 0),
    "files": ("shared", 0),
    "dropped": ("shared", 0),
    "printable": ("shared", 0),
    "journal": ("shared", 0),
    "segments": ("shared", 0),
    "parcels": ("shared", 0),
    "brought": ("shared", 0),
    "by_value": ("shared", 0),
    "culprits": ("shared", 0),
    "registry": ("shared", 0),
    "bucketing": ("shared", 0),
    "machine": ("shared", 0),
    "insight": ("shared", 1),
    "client": ("client", 1),  # timeline, outputs, wire and their parts
    "client.cell_run": ("client", 2),
    "client.launchers": ("client", 2),
    "client.detached": ("client", 2),
    "client.keeping": ("client", 3),
    "client.remote_launchers": ("client", 2),
    "client.host_processes": ("client", 3),
    "client.membership": ("client", 3),
    "client.startup": ("client", 3),
    "client.namespace": ("client", 3),
    "client.attached": ("client", 5),
    "client.cluster": ("client", 5),
    "client.cluster_views": ("client", 5),
    "client.looking": ("client", 2),
    "client.runs": ("client", 2),
    "client.commands": ("client", 6),
    "client.magics": ("client", 6),
    "widgets": ("client", 4),
    "native": ("rank", 2),
    "comm": ("rank", 3),
    "parallel": ("rank", 4),
    "parallel.bucketing": ("rank", 3),
    "parallel.device_copies": ("rank", 3),
    "parallel.device_functions": ("rank", 3),
    "parallel.device_pieces": ("rank", 3),
    "parallel.replica_devices": ("rank", 3),
    "parallel.comm_hooks": ("rank", 3),
    "parallel.compiling": ("rank", 3),
    "parallel.delayed": ("rank", 3),
    "parallel.messages": ("rank", 3),
    "parallel.outputs": ("rank", 3),
    "parallel.process_groups": ("rank", 3),
    "parallel.recording": ("rank", 3),
    "engine": ("rank", 5),
    "engine.bootstrap": ("rank", 6),
    "launch": ("rank", 6),
    "launch.agent": ("top", 7),
    "launch.reports": ("top", 7),
    "launch.serve": ("top", 7),
    "launch.tune": ("top", 7),
    "command_line": ("top", 6),
    "check_install": ("top", 7),
    "cli": ("top", 7),
    "__main__": ("top", 8),
    "bench": ("top", 7),
}
# Imports inside a function that reach upwards on purpose: module -> what it may import there, and why.
LAZY_UPWARD = {
    ("client.timeline_views", "widgets.dashboard"),  # Timeline.dashboard(), Timeline.replay()
    ("client.timeline_views", "widgets.report"),  # Timeline.report()
    ("client.timeline_views", "widgets.views"),  # Timeline.what_if()
    ("client.timeline_views", "widgets.view_figures"),  # Timeline.figure(): plotly is loaded when a figure is asked for
}


def place(module: str) -> tuple[str, int]:
    """Returns the column and level of a module name without the leading `ddp_lab.`."""
    parts = module.split(".")
    while parts and ".".join(parts) not in LAYERS:
        parts.pop()
    return LAYERS[".".join(parts)]


def imports_of(path: Path) -> set[str]:
    """Returns the modules of ddp_lab that a source file imports, without the leading `ddp_lab.`."""
    module = path.relative_to(PACKAGE).with_suffix("").parts
    found: set[str] = set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    guarded = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING"
        for inner in ast.walk(node)
    }
    for node in ast.walk(tree):
        if id(node) in guarded:
            continue
        if isinstance(node, ast.Import):
            found |= {a.name.removeprefix("ddp_lab.") for a in node.names if a.name.startswith("ddp_lab.")}
        elif isinstance(node, ast.ImportFrom):
            if node.level:
                base = list(module[: len(module) - node.level])
            elif (node.module or "").split(".")[0] == "ddp_lab":
                base = []
            else:
                continue
            tail = (node.module or "").removeprefix("ddp_lab").strip(".") if not node.level else (node.module or "")
            base += [p for p in tail.split(".") if p]
            for alias in node.names:
                target = [*base, alias.name]
                exists = (PACKAGE.joinpath(*target)).is_dir() or PACKAGE.joinpath(*target).with_suffix(".py").is_file()
                found.add(".".join(target if exists else base))
    return {name for name in found if name}


def test_modules_import_only_from_lower_layers() -> None:
    """No module imports from a higher level, or from the other side of the wire."""
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        column, level = place(name)
        if column == "any":
            continue
        for target in sorted(imports_of(path)):
            other, height = place(target)
            allowed = other in ("any", "shared") or column == "top" or (other == column and height <= level)
            if not allowed and (name, target) not in LAZY_UPWARD:
                wrong.append(f"{name} ({column} {level}) imports {target} ({other} {height})")
    assert wrong == []


def test_the_sides_import_only_their_own_libraries() -> None:
    """The client never names torch, a rank never names ipywidgets, anywidget or plotly."""
    forbidden = {"client": {"torch"}, "shared": {"torch", "ipywidgets", "plotly", "anywidget"}}
    forbidden["rank"] = {"ipywidgets", "anywidget", "plotly", "pandas"}
    wrong = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix("__init__").rstrip(".")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            roots: set[str] = set()
            if isinstance(node, ast.Import):
                roots = {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                roots = {(node.module or "").split(".")[0]}
            wrong += [f"{name} imports {bad}" for bad in roots & forbidden.get(place(name)[0], set())]
    assert wrong == []
