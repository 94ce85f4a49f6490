"""What `pip install .` gives is whole: built, installed elsewhere and run from a folder that knows nothing of us."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("batchsvc", "engine", "migrations", "workers")
SCRIPT = """
import sys, batchsvc, engine, migrations, workers
for package in (batchsvc, engine, migrations, workers):
    assert package.__file__.startswith(sys.argv[1]), package.__file__
from batchsvc.cli import main
sys.argv = ["batchsvc", "migrate"]
main()
"""


def test_the_wheel_carries_all_it_needs(tmp_path: Path) -> None:
    source, site, elsewhere = tmp_path / "source", tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    for name in PACKAGES:  # a copy: setuptools builds in place, and would keep files that are gone
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    subprocess.run([*pip, "wheel", "--no-deps", "-w", tmp_path, source], check=True, timeout=240)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        carried = {name for name in archive.namelist() if name.split("/")[0] in PACKAGES}
    assert carried == {str(p.relative_to(source)) for n in PACKAGES for p in (source / n).rglob("*") if p.is_file()}
    subprocess.run([*pip, "install", "--no-deps", "--target", site, wheel], check=True, timeout=240)
    env = {
        "PATH": "",
        "PYTHONPATH": str(site),
        "DATABASE_URL": f"sqlite:///{tmp_path / 'db.sqlite3'}",
        "REDIS_URL": "redis://127.0.0.1:9/0",
    }
    done = subprocess.run(
        [sys.executable, "-P", "-c", SCRIPT, str(site)],
        cwd=elsewhere,
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("The database is at revision ")
