"""An engine of a plain target is built from `workers` alone."""

import json
import subprocess
import sys

import pytest

from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.layout import plan_engine
from aerie.workers.runner.local_engine import local_engine
from aerie.workers.scheduling.plan import SamplingParams
from tests.support import ROOT
from tests.support.embedded import embedded_spec
from tests.support.prompts import held_out_prompts, tokenized

PROGRAM = """
import json, sys
import torch
from aerie.attention.config import CacheConfig
from aerie.workers.config import ModelSource, WorkerConfig
from aerie.workers.models.loading import read_target_config
from aerie.workers.runner.layout import plan_engine
from aerie.workers.runner.local_engine import local_engine
from aerie.workers.scheduling.plan import SamplingParams
import pytest

torch.set_num_threads(1)
worker = WorkerConfig(ModelSource(sys.argv[1], device="cpu"), CacheConfig(num_pages=100))
with local_engine(worker, plan_engine(worker, read_target_config(worker.model, 1))) as engine:
    (request,) = engine.generate([json.loads(sys.argv[2])], SamplingParams(8, 0.0))
modules = {name.removeprefix("aerie.").partition(".")[0] for name in sys.modules}
print(json.dumps({"output": request.output, "modules": sorted(modules)}))
"""


@pytest.mark.slow  # imports as they are written: `tests.test_layers`
def test_a_plain_engine_imports_nothing_of_what_speculates() -> None:
    worker, prompt = embedded_spec(None).worker, tokenized(held_out_prompts(1))[0]
    with local_engine(worker, plan_engine(worker, read_target_config(worker.model, 1))) as engine:
        (expected,) = engine.generate([prompt], SamplingParams(8, 0.0))
    assert len(expected.output) == 8
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, worker.model.path, json.dumps(prompt)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["output"] == expected.output
    assert "workers" in found["modules"]
    assert not {"speculative", "cluster", "deploy", "ray"} & set(found["modules"])
