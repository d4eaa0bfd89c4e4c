"""Plans that do not fit a job, new or resumed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conversion_support import (
    folder_bytes,
    job_options,
    write_source,
)
from exllamav3.conversion import ConversionJob, convert, output
from plan_support import LAYER_0, LAYER_1, converted, fused, mixed, plan_file
from safetensors.torch import load_file, save_file

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError, TopologyError

pytestmark = pytest.mark.usefixtures("stand_in")


def plan_refused(source, tmp_path, plan: str, message: str, **changes) -> None:
    options = job_options(source, tmp_path, **changes)
    with pytest.raises(TopologyError, match=message):
        ConversionJob.create(options, plan)
    assert not Path(options.work_dir).exists()
    assert not Path(options.out_dir).exists()


def test_a_bad_plan_is_refused_before_any_folder_is_made(source, tmp_path):
    plan_refused(
        source, tmp_path, plan_file(tmp_path, fused("model.layers.9.self_attn")), "layers.9"
    )
    plan_refused(source, tmp_path, plan_file(tmp_path, fused(bits=9)), "3 to 8")
    plan_refused(source, tmp_path, plan_file(tmp_path, extra=1), "extra")
    plan_refused(source, tmp_path, str(tmp_path / "none.json"), "cannot be read")


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"codebook": "3inst"}, "3inst"), ({"bits": 2.0}, "K=2")],
)
def test_a_job_outside_the_domain_of_the_schema_is_refused(source, tmp_path, changes, message):
    plan_refused(source, tmp_path, plan_file(tmp_path), message, **changes)


def test_two_bits_are_fine_where_the_plan_states_every_rate(source, tmp_path):
    out = converted(source, tmp_path, fused(LAYER_0), fused(LAYER_1), bits=2.0)
    assert TensorFiles(out).describe(f"{LAYER_0}.o_proj.trellis").shape[-1] == 32


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_bf16_sources_are_fused(tmp_path, dtype):
    folder = write_source(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{LAYER_0}.k_proj.weight"] = tensors[f"{LAYER_0}.k_proj.weight"].to(dtype)
    save_file(tensors, folder / "model.safetensors")
    plan_refused(folder, tmp_path, plan_file(tmp_path, fused()), "k_proj.weight.*expected BF16")
    convert(job_options(folder, tmp_path), plan_file(tmp_path, fused(LAYER_1)))


def test_a_failed_check_leaves_no_config_json(source, tmp_path, monkeypatch):
    options = job_options(source, tmp_path)
    with ConversionJob.create(options, plan_file(tmp_path, fused())) as job:

        def lie(*arguments):
            raise TopologyError("the payload is not what was declared")

        monkeypatch.setattr(output.topology_step, "verify", lie)
        with pytest.raises(TopologyError, match="not what was declared"):
            job.run()
    assert not (tmp_path / "out" / "config.json").exists()
    assert (tmp_path / "out" / "model.safetensors").exists()


def interrupted(options, plan: str | None) -> None:
    def stop(name: str) -> None:
        if name == "shards in place":
            raise KeyboardInterrupt

    with ConversionJob.create(options, plan, step=stop) as job, pytest.raises(KeyboardInterrupt):
        job.run()


def test_the_plan_of_a_job_is_kept_when_none_is_given(source, tmp_path):
    expected = converted(source, tmp_path / "whole", fused())
    plan = plan_file(tmp_path, fused())
    options = job_options(source, tmp_path)
    interrupted(options, plan)
    Path(plan).unlink()  # the content is part of the job, not the path
    with ConversionJob.resume(options.work_dir) as job:
        out = job.run().out_dir
    assert folder_bytes(out) == folder_bytes(expected)


def test_the_same_plan_under_another_name_and_order_is_accepted(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupted(options, plan_file(tmp_path, fused(), mixed()))
    other = plan_file(tmp_path, mixed(), fused(), name="other.json")
    with ConversionJob.resume(options.work_dir, qkv_topology=other) as job:
        job.run()


def test_another_plan_is_refused(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupted(options, plan_file(tmp_path, fused()))
    other = plan_file(tmp_path, fused(bits=6), name="other.json")
    with pytest.raises(TopologyError, match=r"other.json: the plan differs"):
        ConversionJob.resume(options.work_dir, qkv_topology=other)


def test_a_plan_for_a_job_without_one_is_refused(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupted(options, None)
    with pytest.raises(TopologyError, match="which had none"):
        ConversionJob.resume(options.work_dir, qkv_topology=plan_file(tmp_path, fused()))


@pytest.mark.parametrize("given", [{"codebook": "mcg"}, {"out_scales": "never"}])
def test_defaults_of_a_planned_job_cannot_change(source, tmp_path, given):
    options = job_options(source, tmp_path)
    interrupted(options, plan_file(tmp_path, fused()))
    with pytest.raises(ConversionError, match=r"cannot change on resume.*QKV topology"):
        ConversionJob.resume(options.work_dir, given)
