"""The engine starts on a bare GPU image: what it imports is torch, triton and numpy, until a model's files are read."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys

ALLOWED = {"torch", "triton", "numpy", "engine", *sys.stdlib_module_names}

class OnlyThese:
    # refuses what a module of ours imports beyond them; what torch imports is its own business
    def find_spec(self, name, path=None, target=None):
        frame = sys._getframe(1)
        while frame.f_globals.get("__name__", "").startswith("importlib"):
            frame = frame.f_back
        importer = frame.f_globals.get("__name__", "")
        if importer.startswith("engine") and name.split(".")[0] not in ALLOWED:
            raise ImportError(f"{importer} imports {name}")

sys.meta_path.insert(0, OnlyThese())
import engine.kernels.gpu.compile
import engine.kernels.gpu.tier
import engine.ondevice.cases
import engine.ondevice.correct
import engine.ondevice.speed
import engine.ondevice.whole
from engine import Engine, EngineConfig, Request, SamplingParams
from engine.ondevice.llama import TOY, random_model
from engine.runner import ModelRunner

config = EngineConfig(model="", weight_format="float32", kv_format="float32", num_blocks=8, device="cpu")
engine = Engine(config, runner=ModelRunner(config, loaded=random_model(TOY)))
(done,) = engine.run([Request(id="a", prompt_ids=[5, 6, 7], params=SamplingParams(max_tokens=4, temperature=0))])
print(len(done.token_ids))
try:
    from engine.load.weights import open_model
except ImportError as error:
    print(error)
"""


def test_the_engine_runs_on_torch_triton_and_numpy_alone() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    answered, refused = done.stdout.splitlines()
    assert answered == "4"
    assert "imports" in refused, "the hook refuses what a loader of files needs"
