"""The bytes of a job without a plan, against a hash that is kept here.

Float32 products differ from one type of processor to the next, because the
libraries below torch choose their kernels by it. The job therefore runs in a
process of its own that pins every such choice to what any x86-64 processor
with AVX2 computes alike. Where the hash fails, something changed the output of
plain jobs: if that was meant (a better quantizer, another layout), say so in
the commit and store the new hash; a topology feature is never a reason.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import torch

PINNED = {
    "MKL_CBWR": "COMPATIBLE",  # one order of summation whatever the processor
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "EXLLAMAV3_ISA": "avx2",
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}
HASHES = {
    ("x86_64", "2.13.0"): "b4c73347018bee1285698692952a2d967c147c4717636841e5b3074c34a07d1d",
}
"""By machine and torch release; the environment that `make test` installs is the first."""

JOB = """
import hashlib, json, sys
from pathlib import Path
from conversion_support import folder_bytes, job_options, write_source
from tiny_models import llama_config
from exllamav3.conversion import convert

root = Path(sys.argv[1])
config = llama_config(intermediate_size=128, vocab_size=128, num_hidden_layers=1)
source = write_source(root / "source", config)
out = convert(job_options(source, root, cal_rows=4)).out_dir
for name in ("config.json", "quantization_config.json"):
    values = json.loads((out / name).read_text())
    values.get("quantization_config", values).pop("version")
    (out / name).write_text(json.dumps(values))
digest = hashlib.sha256()
for name, content in folder_bytes(out).items():
    digest.update(f"{name} {len(content)} ".encode() + content)
print(digest.hexdigest())
"""


def run_job(folder: Path) -> str:
    """Hash of everything the job wrote but the version."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    environment = {**os.environ, **PINNED, "PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, "-c", JOB, str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-1]


def test_a_job_without_a_plan_makes_the_bytes_it_always_made(tmp_path):
    found = run_job(tmp_path / "one")
    environment = platform.machine(), torch.__version__.partition("+")[0]
    # Elsewhere there is nothing to compare with but another run of the same job.
    expected = HASHES.get(environment) or run_job(tmp_path / "two")
    assert found == expected, f"{environment}: the output of plain jobs changed"
