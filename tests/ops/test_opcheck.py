"""Schema, fake and dispatch of every operator, with native code and without."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from samples import native_only, random_delta_inputs, random_input, random_weight

import exllamav3_ext
from exllamav3 import ops

WEIGHT = random_weight()
HALF = random_weight(bits=2.5)
X = random_input(3, 256)
STATES = torch.randint(-32768, 32768, (2, 3, 256)).to(torch.int16)

CASES = {
    "pack": (STATES, 3.0),
    "unpack": (WEIGHT.trellis,),
    "decode": (HALF.trellis, 2),
    "reconstruct": (*WEIGHT[:3], 1, torch.float16),
    "reconstruct_columns": (*WEIGHT[:3], 1),
    "rotate_input": (X, WEIGHT.suh),
    "hadamard": (X, WEIGHT.suh, None),
    "quantize_tiles": (torch.randn(2, 256), 4, 2),
    "linear": (X, *WEIGHT, 0, torch.float32),
    "linear_group": (
        X.half(), [WEIGHT.trellis, HALF.trellis], [WEIGHT.suh] * 2, [WEIGHT.svh] * 2, [0, 2],
        torch.float16,
    ),
    "deinterleave_qg": (torch.randn(2, 3, 64).half(), 8),
    "gated_delta_rule": tuple(random_delta_inputs()),
    "advance_delta_rule": (
        *random_delta_inputs()[:5], torch.rand(5, 4, 32, 48), torch.tensor([3, 1]),
        torch.tensor([False, True]),
    ),
    "rms_norm": (X, X[0], 1e-6, X, torch.float16),
    "norm_rotate": (X.view(1, 3, 2, 128), X[0, :128], 1e-6, *X[None, :, None, :96].split(48, -1)),
    "gate_mul": (X, X, True),
    "delta_inputs": (
        X[None], torch.zeros(1, 256, 3), torch.randn(256, 1, 4), X[None, :, :2], X[None, :, 2:4],
        X[0, :2], X[1, :2], None, 2, 48,
    ),
}  # fmt: skip
TORCH_ONLY = {
    "advance_delta_rule", "rms_norm", "norm_rotate", "gate_mul", "delta_inputs",
    "reconstruct_columns", "rotate_input",
}  # fmt: skip
"""Fused on a GPU, where launches cost, or used on a GPU only; on the CPU torch is as good."""


@pytest.mark.parametrize("op", list(CASES))
def test_operator_passes_opcheck(op, device):
    arguments = torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.to(device), CASES[op])
    torch.library.opcheck(getattr(torch.ops.exllamav3, op).default, arguments)


@pytest.mark.parametrize("op", list(CASES))
def test_results_are_contiguous_and_share_no_memory_with_the_arguments(op):
    def storages(values) -> set[int]:
        flat = torch.utils._pytree.tree_leaves(list(values))
        return {t.untyped_storage().data_ptr() for t in flat if isinstance(t, torch.Tensor)}

    results = getattr(torch.ops.exllamav3, op)(*CASES[op])
    results = [results] if isinstance(results, torch.Tensor) else list(results)
    assert all(result.is_contiguous() for result in results)
    assert not storages(results) & storages(CASES[op])


def test_every_schema_is_checked_somewhere():
    names = {schema.split("(")[0] for schema in exllamav3_ext.schema.SCHEMAS}
    assert names - {"build_info"} == set(CASES)


@pytest.mark.parametrize("op", list(CASES))
def test_the_cpu_is_served_by_native_code_if_there_is_any(op):
    no_kernel = exllamav3_ext.native_missing_reason or op in TORCH_ONLY
    expected = "reference" if no_kernel else "native"
    assert ops.backend(op, "cpu") == expected


@pytest.mark.cuda
@pytest.mark.parametrize("op", list(CASES))
def test_a_gpu_is_served_by_native_code(op):
    assert ops.backend(op, "cuda") == "native"


@native_only
def test_all_of_this_holds_without_native_code_too():
    here = Path(__file__).parent
    files = [here / name for name in ("test_opcheck.py", "test_deinterleave.py")]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *files],
        env={**os.environ, "EXLLAMAV3_BUILD": "none", "EXL3_FAIL_ON_SKIP": "0"},
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stdout
