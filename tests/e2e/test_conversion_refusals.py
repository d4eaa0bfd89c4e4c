"""Jobs that cannot start: what is refused before work begins, and that nothing stays behind."""

from __future__ import annotations

import collections
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversion_support import (
    Recorder,
    folder_bytes,
    interrupt,
    job_options,
    refused,
    write_source,
)
from exllamav3.conversion import ConversionJob, convert, layout
from safetensors.torch import load_file, save_file
from tiny_models import llama_config, qwen35_config, random_tensors, write_folder

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError, FormatError, UnsupportedError

pytestmark = pytest.mark.usefixtures("stand_in")


Usage = collections.namedtuple("Usage", "total used free")


@pytest.mark.parametrize(("one", "two"), [("in_dir", "out_dir"), ("in_dir", "work_dir")])
def test_the_source_is_never_written_to(source, tmp_path, one, two):
    options = job_options(source, tmp_path)
    before = folder_bytes(source)
    refused(job_options(source, tmp_path, **{two: getattr(options, one)}), "are the same folder")
    assert folder_bytes(source) == before


def test_work_and_output_must_differ(source, tmp_path):
    refused(job_options(source, tmp_path, out_dir=str(tmp_path / "work")), "-w and -o are the same")


def test_a_missing_source_is_refused(source, tmp_path):
    refused(job_options(source, tmp_path, in_dir=str(tmp_path / "none")), "is not a folder")


def test_an_output_folder_that_holds_something_is_refused_and_kept(source, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused(job_options(source, tmp_path), r"not empty \(it holds notes.txt\)")
    assert folder_bytes(tmp_path / "out") == {"notes.txt": b"mine"}


def test_a_work_folder_that_holds_something_is_refused(source, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("mine")
    refused(job_options(source, tmp_path), "holds something else")


def test_an_exl3_source_is_refused(source, tmp_path):
    convert(job_options(source, tmp_path))
    options = job_options(tmp_path / "out", tmp_path / "again", cal_data=None)
    refused(options, "already quantized .*exl3.*convert the BF16 model")


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
def test_a_source_quantized_by_another_method_is_refused_with_the_reason(tmp_path, key):
    section = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    folder = write_source(tmp_path / "source")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, key: section}))
    refused(job_options(folder, tmp_path), key, UnsupportedError)


def test_float8_weights_are_refused_even_without_a_configuration(tmp_path):
    folder = write_source(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    refused(job_options(folder, tmp_path), rf"{name} \(F8_E4M3.*already quantized")


def test_a_tensor_that_no_part_of_the_model_reads_is_refused(tmp_path):
    folder = write_source(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.sinks"] = torch.zeros(2)
    save_file(tensors, folder / "model.safetensors")
    refused(job_options(folder, tmp_path), "belong to no part.*self_attn.sinks.*would lose them")


def test_rotary_buffers_are_dropped_and_the_reason_is_listed(tmp_path):
    folder = write_source(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tensors[name] = torch.zeros(32)
    save_file(tensors, folder / "model.safetensors")
    listener = Recorder()
    options = job_options(folder, tmp_path)
    with ConversionJob.create(options, listener=listener) as job:
        job.run()
    assert f"dropped     {name}: rotary frequencies are computed from config.json" in listener.lines
    assert not TensorFiles(options.out_dir).has(name)


def test_missing_tensors_are_named(tmp_path):
    folder = write_source(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    refused(job_options(folder, tmp_path), "missing.*layers.1.mlp.up_proj.weight")


def test_a_weight_of_another_shape_is_refused_before_the_job_starts(tmp_path):
    folder = write_source(tmp_path / "source")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(64, 128)
    save_file(tensors, folder / "model.safetensors")
    refused(job_options(folder, tmp_path), r"shape \[64, 128\].*asks for \[128, 128\]", FormatError)


def test_too_little_disk_space_is_refused_up_front(source, tmp_path, monkeypatch):
    monkeypatch.setattr(layout.shutil, "disk_usage", lambda path: Usage(10**6, 0, 10**4))
    refused(job_options(source, tmp_path), r"the job needs about .* MB here, 0.01 MB are free")


def test_devices_that_are_not_there_are_refused(source, tmp_path):
    for name, message in (("cuda:9", "does not exist here"), ("gpu", "is no device")):
        refused(job_options(source, tmp_path, devices=(name,)), f"-d: .*'{name}' {message}")


def test_too_few_calibration_rows_are_refused(source, tmp_path):
    refused(job_options(source, tmp_path, cal_rows=13), "holds 12 rows, asked for 13")


def test_a_model_without_tokenizer_needs_packed_rows(source, tmp_path):
    refused(job_options(source, tmp_path, cal_data=None), "no tokenizer.json", FormatError)


def everything(folder: Path) -> set[Path]:
    return set(folder.rglob("*"))


@pytest.mark.parametrize("change", ["short calibration", "full output", "output under a file"])
def test_a_job_that_cannot_start_leaves_nothing_behind(source, tmp_path, change):
    options = job_options(source, tmp_path, work_dir=str(tmp_path / "new" / "work"))
    if change == "short calibration":
        options = replace(options, cal_rows=10**6)
    elif change == "full output":
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "notes.txt").write_text("mine")
    else:
        (tmp_path / "file").write_text("mine")
        options = replace(options, out_dir=str(tmp_path / "file" / "out"))
    before = everything(tmp_path)
    with pytest.raises((ConversionError, OSError)):
        ConversionJob.create(options)
    assert everything(tmp_path) == before


def test_a_job_that_cannot_start_leaves_a_stored_job_alone(source, tmp_path):
    interrupt(job_options(source, tmp_path))
    before = everything(tmp_path)
    with pytest.raises(ConversionError, match="holds a job already"):
        ConversionJob.create(job_options(source, tmp_path))
    assert everything(tmp_path) == before
    with ConversionJob.resume(str(tmp_path / "work")) as job:
        job.run()


@pytest.mark.parametrize(("work", "out"), [("a", "a/ckpt"), ("a/b/work", "a")])
def test_work_and_output_are_not_inside_one_another(source, tmp_path, work, out):
    options = job_options(
        source, tmp_path, work_dir=str(tmp_path / work), out_dir=str(tmp_path / out)
    )
    refused(options, "is inside -[wo]")
    assert not everything(tmp_path)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("model.norm.weight", torch.ones(1)),
        ("model.layers.0.input_layernorm.weight", torch.ones(1, 128)),
        ("model.embed_tokens.weight", torch.ones(200, 128)),
        ("model.layers.0.linear_attn.A_log", torch.ones(3)),
        ("model.layers.0.linear_attn.conv1d.weight", torch.ones(4, 4)),
    ],
)
def test_every_shape_is_checked_before_work_begins(tmp_path, name, tensor):
    config = qwen35_config()
    tensors = random_tensors(config) | {name: tensor.bfloat16()}
    write_folder(tmp_path / "source", config, tensors)
    refused(job_options(tmp_path / "source", tmp_path), f"{name}: .* has shape", FormatError)


def test_a_tied_head_that_differs_is_refused_before_work_begins(tmp_path):
    config = llama_config(tie_word_embeddings=True)
    write_folder(tmp_path / "source", config, random_tensors(llama_config()))
    options = job_options(tmp_path / "source", tmp_path)
    refused(options, r"lm_head\.weight: differs from model\.embed_tokens\.weight", FormatError)


def test_float64_weights_are_not_called_quantized(tmp_path):
    config, name = llama_config(), "model.layers.0.self_attn.q_proj.weight"
    tensors = random_tensors(config)
    write_folder(tmp_path / "source", config, tensors | {name: tensors[name].double()})
    options = job_options(tmp_path / "source", tmp_path)
    refused(options, "stored as F64, expected one of BF16", FormatError)


@pytest.mark.parametrize("name", ["in_dir", "work_dir", "out_dir"])
@pytest.mark.parametrize("path", ["folder-\udcff", "folder-\x00"])
def test_a_path_that_no_file_can_be_read_from_is_refused(source, tmp_path, name, path):
    with pytest.raises(ConversionError, match="expected a path in UTF-8"):
        job_options(source, tmp_path, **{name: path})


@pytest.mark.parametrize("device", ["cpu:3", "meta"])
def test_a_device_that_is_not_there_is_refused(source, tmp_path, device):
    refused(job_options(source, tmp_path, devices=(device,)), "does not exist here;.* use cpu")


@pytest.mark.parametrize("name", ["work_dir", "out_dir"])
@pytest.mark.parametrize("target", ["nowhere", "link"])
def test_a_link_to_nowhere_is_no_folder(source, tmp_path, name, target):
    (tmp_path / "link").symlink_to(tmp_path / target)
    options = job_options(source, tmp_path, **{name: str(tmp_path / "link")})
    refused(options, "is a link to nowhere; remove it or choose another")


def test_a_source_that_links_to_itself_is_no_folder(tmp_path, source):
    (tmp_path / "link").symlink_to(tmp_path / "link")
    refused(job_options(source, tmp_path, in_dir=str(tmp_path / "link")), "is not a folder")


def test_a_source_of_links_is_converted_like_one_of_files(source, tmp_path):
    linked = tmp_path / "linked"
    linked.mkdir()
    for path in source.iterdir():
        (linked / path.name).symlink_to(path)
    expected = convert(job_options(source, tmp_path / "a")).out_dir
    options = job_options(source, tmp_path / "b", in_dir=str(linked))
    assert folder_bytes(convert(options).out_dir) == folder_bytes(expected)


def test_names_in_any_script_are_fine(source, tmp_path):
    root = tmp_path / "wörk 模型 \n 🙂"
    linked = root / "source"
    shutil.copytree(source, linked)
    options = job_options(source, root, in_dir=str(linked))
    assert (convert(options).out_dir / "config.json").is_file()
