"""Jobs from start to end: reports, equal bytes, shards, heads, rows that fail."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest
import torch
from conversion_support import (
    CALIBRATION,
    Recorder,
    folder_bytes,
    job_options,
    write_source,
)
from exllamav3.conversion import ConversionJob, convert, pipeline
from safetensors.torch import load_file, save_file
from tiny_models import llama_config, random_tensors, write_folder

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError, FormatError

pytestmark = pytest.mark.usefixtures("stand_in")


def test_a_job_reports_every_module_and_compares_the_quantized_ones(source, tmp_path):
    listener = Recorder()
    with ConversionJob.create(job_options(source, tmp_path), listener=listener) as job:
        result = job.run()
    assert listener.modules == [
        ("model.embed_tokens", False, False),
        ("model.layers.0", True, False),
        ("model.layers.1", True, False),
        ("model.norm", False, False),
        ("lm_head", True, False),
    ]
    assert [len(module.linears) for module in result.modules] == [0, 7, 7, 0, 1]
    assert result.mean_bits == 3.0
    rates = "bits        per weight: 3 asked, achieved decoder 3.00, with head 3.12"
    assert rates in listener.lines


def test_the_same_job_gives_the_same_bytes(source, tmp_path):
    first = convert(job_options(source, tmp_path / "a")).out_dir
    second = convert(job_options(source, tmp_path / "b")).out_dir
    assert folder_bytes(first) == folder_bytes(second)


def test_another_seed_gives_other_bytes(source, tmp_path):
    first = convert(job_options(source, tmp_path / "a")).out_dir
    second = convert(job_options(source, tmp_path / "b", seed=1)).out_dir
    assert folder_bytes(first) != folder_bytes(second)


def test_rows_spread_over_two_devices_give_the_same_structure(source, tmp_path):
    """Two CPU "devices" take the way of two GPUs: replicas, shares, merged Hessians."""
    one = convert(job_options(source, tmp_path / "a")).out_dir
    two = convert(job_options(source, tmp_path / "b", devices=("cpu", "cpu"))).out_dir
    assert TensorFiles(one).inventory() == TensorFiles(two).inventory()
    again = convert(job_options(source, tmp_path / "c", devices=("cpu", "cpu"))).out_dir
    assert folder_bytes(two) == folder_bytes(again)


def test_automatic_scales_measure_gate_and_up_projections_and_nothing_else(
    source, tmp_path, monkeypatch
):
    measured = {}

    def decide(policy, weight_OI, sensitivity_O):
        assert policy == "auto"
        measured[tuple(weight_OI.shape), sensitivity_O is not None] = sensitivity_O
        return sensitivity_O is None

    monkeypatch.setattr(pipeline, "use_output_scales", decide)
    with ConversionJob.create(job_options(source, tmp_path, out_scales="auto")) as job:
        result = job.run()
    linears = {linear.key: linear for module in result.modules for linear in module.linears}
    for key, linear in linears.items():
        assert linear.out_scales == (not key.endswith(("gate_proj", "up_proj")))
    assert [shape for shape, has in measured if has] == [(128, 128)]
    assert all(s.shape == (128,) and (s >= 0).all() for (_, has), s in measured.items() if has)


def test_three_and_a_half_bits_mix_threes_and_fours(source, tmp_path):
    result = convert(job_options(source, tmp_path, bits=3.5))
    rates = {
        linear.bits
        for module in result.modules
        for linear in module.linears
        if linear.key != "lm_head"
    }
    assert rates == {3, 4}
    section = json.loads((result.out_dir / "config.json").read_text())["quantization_config"]
    assert 3.0 < section["bits"] <= 3.5
    assert section["bits"] == round(result.mean_bits, 2)


def test_a_sharded_source_gives_the_same_bytes_as_one_file(source, tmp_path):
    config = json.loads((source / "config.json").read_text())
    sharded = write_source(tmp_path / "sharded", config, shards=3)
    first = convert(job_options(source, tmp_path / "a")).out_dir
    second = convert(job_options(sharded, tmp_path / "b")).out_dir
    assert folder_bytes(first) == folder_bytes(second)


def test_several_output_shards_have_an_index_that_loads(tmp_path):
    folder = write_source(tmp_path / "source", llama_config(vocab_size=4200))
    out = convert(job_options(folder, tmp_path, shard_size=1)).out_dir
    names = sorted(path.name for path in out.glob("*.safetensors"))
    assert names == [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = TensorFiles(out)
    assert index["weight_map"].keys() == set(files.names())
    total = sum(t.numel() * t.element_size() for t in map(files.get, files.names()))
    assert index["metadata"] == {"total_size": total}


def test_tied_embeddings_become_a_head_of_its_own(tmp_path):
    config = llama_config(tie_word_embeddings=True)
    out = convert(job_options(write_source(tmp_path / "source", config), tmp_path)).out_dir
    assert TensorFiles(out).has("lm_head.trellis")
    assert json.loads((out / "config.json").read_text())["tie_word_embeddings"] is False


@pytest.mark.parametrize("tied", [False, True])
def test_an_unquantized_head_is_stored_as_float16(tmp_path, tied):
    folder = write_source(tmp_path / "source", llama_config(tie_word_embeddings=tied))
    out = convert(job_options(folder, tmp_path, head_bits=16)).out_dir
    before, after = TensorFiles(folder), TensorFiles(out)
    name = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert torch.equal(after.get("lm_head.weight"), before.get(name).half())
    assert not after.has("lm_head.trellis")
    assert json.loads((out / "config.json").read_text())["quantization_config"]["head_bits"] == 16


def test_a_row_that_becomes_infinite_is_dropped_and_too_many_stop_the_job(tmp_path):
    folder = write_source(tmp_path / "source", llama_config(vocab_size=64))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][63] = float("inf")
    save_file(tensors, folder / "model.safetensors")
    ids = torch.randint(0, 63, (12, 24))
    ids[5, 3] = 63
    save_file({"input_ids": ids}, folder.parent / CALIBRATION)
    listener = Recorder()
    options = job_options(folder, tmp_path, cal_rows=12)
    with ConversionJob.create(options, listener=listener) as job:
        result = job.run()
    assert result.modules[0].bad_rows == ()
    ids[6:9, 3] = 63
    save_file({"input_ids": ids}, folder.parent / CALIBRATION)
    with (
        ConversionJob.create(job_options(folder, tmp_path / "many", cal_rows=12)) as job,
        pytest.raises(ConversionError, match="of 12 calibration rows have become infinite"),
    ):
        job.run()


def test_a_full_disk_loses_nothing_finished(source, tmp_path):
    options = job_options(source, tmp_path / "job")
    seen: list[str] = []

    def full(name: str) -> None:
        seen.append(name)
        if seen.count("module tensor") == 3:
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        ConversionJob.create(options, step=full) as job,
        pytest.raises(ConversionError, match=r"no space left.*--resume"),
    ):
        job.run()
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, listener=listener) as job:
        job.run()
    assert [m for m in listener.modules if m[2]] == []
    assert len(listener.modules) == 3
    expected = convert(job_options(source, tmp_path / "whole")).out_dir
    assert folder_bytes(Path(options.out_dir)) == folder_bytes(expected)


def test_an_unpaired_surrogate_in_the_configuration_is_written_back(tmp_path):
    path = write_source(tmp_path / "source") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "\ud800"}))
    convert(job_options(tmp_path / "source", tmp_path))
    written = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert written["_name_or_path"] == "\ud800"


def test_a_weight_that_is_not_finite_is_refused_by_its_name(tmp_path, monkeypatch):
    monkeypatch.undo()  # the real quantizer
    config, name = llama_config(intermediate_size=128), "model.layers.0.self_attn.q_proj"
    source = write_source(tmp_path / "source", config)
    tensors = random_tensors(config)
    tensors[f"{name}.weight"][3, 5] = float("nan")
    write_folder(source, config, tensors)
    with (
        ConversionJob.create(job_options(source, tmp_path)) as job,
        pytest.raises(FormatError, match=rf"{name}: weight: 1 of .* not finite"),
    ):
        job.run()
