"""Keeps README, the tree and the layer rules true to each other; each test tells the rule that it guards."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchsvc.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGES = ("batchsvc", "engine", "workers")
MOST_LINES = 500


def sources(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted((ROOT / folder).rglob("*.py"))


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def imports_of(path: Path) -> set[str]:
    """Every module that the file imports, at whatever depth of its code."""
    found: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found.update(f"{node.module}.{alias.name}" for alias in node.names)
    return found


def files_that_import(package: str, *folders: str) -> set[str]:
    return {
        str(path.relative_to(ROOT))
        for path in sources(*folders)
        if any(name == package or name.startswith(package + ".") for name in imports_of(path))
    }


def test_the_top_level_is_what_the_design_says() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split(
        "\n"
    )
    top = {name.split("/")[0] for name in tracked if name and not name.startswith(".")}
    allowed = {"pyproject.toml", "README.md", "LICENSE", "batchsvc", "engine", "migrations", "tests", "workers"}
    assert top <= allowed


@pytest.mark.parametrize(
    "path", list(sources(*PACKAGES, "tests", "migrations")), ids=lambda p: str(p.relative_to(ROOT))
)
def test_a_file_has_one_reason_said_first_and_stays_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= MOST_LINES, f"{path.name} is over {MOST_LINES} lines: split it by reason to exist"
    if text.strip():
        doc = ast.get_docstring(tree_of(path))
        assert doc, f"{path.name} doesn't say why it exists"


def test_readme_maps_every_file() -> None:
    """The file map is how a newcomer finds things: a file that isn't in it doesn't exist for them."""
    for path in sources(*PACKAGES):
        if path.read_text(encoding="utf-8").strip() and path.name != "__init__.py":
            assert f"`{path.relative_to(ROOT)}`" in README, f"README's file map lacks {path.relative_to(ROOT)}"


def test_readme_names_only_files_that_exist() -> None:
    for name in re.findall(r"`((?:batchsvc|engine|workers|migrations|tests|\.ci)/[\w/.\-]*\w)`", README):
        assert (ROOT / name).exists(), f"README names {name}, which doesn't exist"


def test_the_life_of_a_batch_names_a_file_in_each_step() -> None:
    life = README.split("## The life of a batch", 1)[1].split("\n## ", 1)[0]
    steps = re.split(r"\n(?=\d+\. )", life)[1:]
    assert len(steps) == 12
    for step in steps:
        assert re.search(r"`(batchsvc|engine|workers)/[\w/]+\.py`", step), f"no file in: {step[:60]}"


def test_every_setting_stands_in_readme_as_it_is_described() -> None:
    for name, field in Settings.model_fields.items():
        alias = field.validation_alias
        names = [str(c) for c in getattr(alias, "choices", [])] or [str(alias) if alias else f"BATCHSVC_{name.upper()}"]
        row = next((line for line in README.split("\n") if line.startswith(f"| `{names[0]}`")), None)
        assert row, f"README's table of settings lacks {names[0]}"
        assert field.description, f"the setting {name} has no description"
        assert field.description in row, f"README describes {names[0]} otherwise than settings.py"


def test_each_library_has_its_one_place() -> None:
    assert files_that_import("boto3", *PACKAGES) == {"batchsvc/store/s3.py", "batchsvc/store/foreign.py"}
    celery = files_that_import("celery", *PACKAGES) | files_that_import("kombu", *PACKAGES)
    assert {name for name in celery if not name.startswith("workers/")} <= {"batchsvc/dispatch.py"}
    assert files_that_import("jinja2", *PACKAGES) == {"engine/text/chat.py"}, "there is exactly one render site"
    assert files_that_import("alembic", *PACKAGES) == {"batchsvc/db/migrate.py"}
    assert files_that_import("gguf", *PACKAGES) <= {
        "engine/load/gguf.py",
        "engine/load/gguf_groups.py",
        "engine/load/weights.py",
    }


def test_sql_is_written_in_query_files_only() -> None:
    """`select`, `insert`, `update`, `delete` and `text` of SQLAlchemy belong to *queries.py, tables and db/."""
    verbs = {f"sqlalchemy.{verb}" for verb in ("select", "insert", "update", "delete", "text")}
    for path in sources("batchsvc", "workers"):
        name = str(path.relative_to(ROOT))
        if path.name.endswith("queries.py") or path.name == "tables.py" or name.startswith("batchsvc/db/"):
            continue
        assert not verbs & imports_of(path), f"{name} writes SQL: move it to a queries.py"


def test_the_clock_is_read_in_one_place() -> None:
    """Durations may use time.monotonic; wall-clock time comes from clock.py or from the database."""
    for path in sources("batchsvc", "workers"):
        if path.name == "clock.py":
            continue
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                read = (node.value.id, node.attr)
                assert read not in {
                    ("time", "time"),
                    ("time", "time_ns"),
                    ("datetime", "now"),
                    ("datetime", "utcnow"),
                }, f"{path.relative_to(ROOT)}:{node.lineno} reads the clock: use batchsvc.clock"


def test_no_stub_and_no_suppressed_type_is_left_behind() -> None:
    for path in sources(*PACKAGES):
        text = path.read_text(encoding="utf-8")
        for word in ("raise NotImplementedError", "TODO", "FIXME", "type: ignore", "pragma: no cover"):
            assert word not in text, f"{path.relative_to(ROOT)} holds {word}"


@pytest.mark.parametrize("module", ["batchsvc.app", "batchsvc.cli", "batchsvc.dispatch", "batchsvc.batches.planning"])
def test_the_service_loads_no_torch(module: str) -> None:
    """import-linter sees the text of imports; only sys.modules tells what an import really loads."""
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0


def test_control_processes_load_no_torch() -> None:
    code = "import sys, workers.plan, workers.finalize, workers.reaper; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, timeout=120).returncode == 0
