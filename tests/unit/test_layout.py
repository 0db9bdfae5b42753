"""The shape of the repository: what lies where, what imports what, what nobody may write."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

import samestep

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("platform", "workloads", "deploy", "dashboards", "tests", ".ci")
PACKAGE = ROOT / "platform" / "samestep"
NUM_LINES_LIMIT = 500


def text_files() -> Iterator[tuple[Path, str]]:
    """Every text file of the repository, without what git ignores and what runs left behind."""
    paths = [path for path in ROOT.iterdir() if path.is_file() and path.suffix != ".json"]
    for folder in FOLDERS:
        paths += (path for path in (ROOT / folder).rglob("*") if path.is_file())
    for path in sorted(paths):
        if {"__pycache__", "runs"} & set(path.relative_to(ROOT).parts):
            continue
        try:
            yield path, path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue


def python_files() -> Iterator[tuple[Path, str]]:
    return ((path, text) for path, text in text_files() if path.suffix == ".py")


def offending(pattern: str, files: Iterator[tuple[Path, str]]) -> list[str]:
    """Lines `file:line: text` in which the pattern is found, this file left out."""
    found = re.compile(pattern)
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in files
        if path != Path(__file__).resolve()
        for number, line in enumerate(text.splitlines(), 1)
        if found.search(line)
    ]


def run_python(code: str) -> str:
    """Runs the code in a fresh interpreter that finds the package, and gives its output."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT / "platform",
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_what_trains_nothing_starts_without_torch() -> None:
    """The recorder, and the controller until its workers start: importing it takes seconds."""
    modules = ("samestep.cluster.actors", "samestep.cluster.ray_private_control")
    assert (
        run_python(f"import sys, {', '.join(modules)}; print('torch' in sys.modules)") == "False\n"
    )


def test_the_top_level_is_complete() -> None:
    missing = [name for name in FOLDERS if not (ROOT / name).is_dir()]
    assert missing == []
    for folder in ("deploy", "dashboards"):
        assert (ROOT / folder / "README.md").is_file()


def test_platform_is_no_package_and_does_not_shadow_the_standard_library() -> None:
    assert not (ROOT / "platform" / "__init__.py").exists()
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import platform; platform.system()"
    run_python(code)


def test_importing_the_package_loads_neither_torch_nor_ray_nor_mlflow() -> None:
    heavy = run_python(
        "import sys, samestep; print(sorted({'torch', 'ray', 'mlflow'} & set(sys.modules)))"
    )
    assert heavy.strip() == "[]"


def test_a_recorder_loads_no_torch_whatever_it_writes() -> None:
    modules = ("recorder", "sinks", "mlflow_sink", "prometheus_sink", "settling")
    names = ", ".join(f"samestep.telemetry.{name}" for name in modules)
    assert run_python(f"import sys, {names}; print('torch' in sys.modules)").strip() == "False"


def test_the_public_names_are_sorted_and_each_resolves() -> None:
    assert samestep.__all__ == sorted(samestep.__all__)
    run_python("import samestep\nfor name in samestep.__all__: getattr(samestep, name)")


def test_an_unknown_public_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = samestep.trian


def test_every_folder_of_the_package_is_a_package() -> None:
    folders = {path.parent for path in PACKAGE.rglob("*.py")}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_workloads_use_public_names_only() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}: {node.module}"
        for path, text in python_files()
        if path.is_relative_to(ROOT / "workloads")
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("samestep.")
    ]
    assert wrong == []


def test_the_exact_part_knows_no_process_group() -> None:
    files = ((path, text) for path, text in python_files() if path.parent == PACKAGE / "exact")
    assert offending(r"\b(torch\.distributed|torch import distributed)\b", files) == []


def test_no_python_file_is_longer_than_the_limit() -> None:
    long = {
        str(path.relative_to(ROOT)): text.count("\n")
        for path, text in python_files()
        if text.count("\n") > NUM_LINES_LIMIT
    }
    assert long == {}


def calls_of_distributed(names: set[str]) -> list[tuple[Path, ast.Call]]:
    """The package's calls of functions of torch.distributed."""
    return [
        (path.relative_to(PACKAGE), node)
        for path in sorted(PACKAGE.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in names
    ]


def test_every_process_group_is_made_with_a_timeout() -> None:
    """A new group does not take the one given to init: it would wait for 30 minutes."""
    calls = calls_of_distributed({"new_group", "init_process_group", "TCPStore"})
    assert {call.func.attr for _, call in calls if isinstance(call.func, ast.Attribute)} == {
        "new_group",
        "init_process_group",
        "TCPStore",
    }
    for path, call in calls:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        is_alone = given.get("world_size") == "1"  # there is nobody to wait for
        assert "timeout" in given or is_alone, f"{path}:{call.lineno}"


def test_no_ring_collective_stands_in_a_step_on_the_cpu() -> None:
    """In a ring those far from a worker that died wait until the others have left."""
    rings = {name for name in vars(dist) if re.match("(all_|reduce|broad|scatter|gather)", name)}
    assert {"all_reduce", "broadcast", "all_gather"} <= rings
    found = {
        str(path)
        for path, call in calls_of_distributed(rings | {"barrier", "monitored_barrier"})
        if ast.unparse(call.func).startswith("dist.")
    }
    assert found == {"engine/collective.py"}  # for NCCL


def test_nothing_names_a_path_of_the_machine_it_was_written_on() -> None:
    own = rf"{re.escape(str(ROOT))}(?![\w-])"
    assert offending(own, text_files()) == []


def test_nothing_is_marked_as_unfinished() -> None:
    assert offending(r"\b(TODO|FIXME|XXX|NotImplementedError)\b", python_files()) == []


def test_tests_wait_on_conditions_and_never_sleep() -> None:
    files = ((path, text) for path, text in python_files() if "tests" in path.parts)
    assert offending(r"\btime\.sleep\(", files) == []


def test_what_takes_roots_rights_is_run_by_make_test_system() -> None:
    marked = {
        path.relative_to(ROOT).as_posix()
        for path, text in python_files()
        if "tests" in path.parts and re.search(r"= \[?pytest\.mark\.root\b", text)
    }
    makefile = (ROOT / "Makefile").read_text().replace("\\\n", " ")
    [told] = re.findall(r"^ROOT_TESTS := (.*)$", makefile, re.M)
    assert set(told.split()) == marked != set()


def test_nothing_ends_processes_by_name() -> None:
    code = ((path, text) for path, text in text_files() if path.suffix != ".md")
    assert offending(r"\bpkill\b|\bkillall\b|\bray stop\b|[\"']ray[\"'], *[\"']stop", code) == []


def pins() -> dict[str, Version]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    entries = [line for line in lines if line and not line.startswith("#")]
    assert [line for line in entries if not re.fullmatch(r"[\w.-]+==[\w.!]+", line)] == []
    return {
        canonicalize_name(name): Version(version)
        for name, _, version in (line.partition("==") for line in entries)
    }


def declared() -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [line for lines in project["optional-dependencies"].values() for line in lines]
    return [Requirement(line) for line in project["dependencies"] + extras]


def test_every_dependency_is_pinned_within_its_range() -> None:
    pinned = pins()
    wrong = [
        str(requirement)
        for requirement in declared()
        if pinned.get(canonicalize_name(requirement.name)) not in requirement.specifier
    ]
    assert wrong == []


def test_a_third_party_import_of_the_package_is_a_declared_dependency() -> None:
    known = {canonicalize_name(requirement.name) for requirement in declared()}
    known |= {"yaml", "samestep", "sklearn"}  # PyYAML, ourselves, scikit-learn
    unknown = sorted(
        f"{path.relative_to(ROOT)}: {name}"
        for path, text in python_files()
        if path.is_relative_to(PACKAGE) or path.is_relative_to(ROOT / "workloads")
        for name in imported(ast.parse(text))
        if name not in sys.stdlib_module_names and canonicalize_name(name) not in known
    )
    assert unknown == []


def imported(tree: ast.Module) -> Iterator[str]:
    """First parts of the absolute names that a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]
