"""Jobs: what is refused before work begins, and what a resume keeps, changes or refuses."""

from __future__ import annotations

import collections
import errno
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conversion_support import (
    CALIBRATION,
    folder_bytes,
    job_options,
    stand_in_quantize,
    write_source,
)
from exllamav3.conversion import ConversionJob, convert, layout, pipeline
from exllamav3.conversion.reports import Silent
from safetensors.torch import load_file, save_file
from tiny_models import llama_config, qwen35_config, random_tensors, write_folder

from exllamav3.checkpoint.tensor_files import TensorFiles
from exllamav3.errors import ConversionError, FormatError, UnsupportedError

Usage = collections.namedtuple("Usage", "total used free")


@pytest.fixture(autouse=True)
def stand_in(monkeypatch):
    monkeypatch.setattr(pipeline, "quantize_linear", stand_in_quantize)


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write_source(tmp_path_factory.mktemp("job") / "source")


def stop_at(wanted: str, occurrence: int = 1, error: type[BaseException] = KeyboardInterrupt):
    seen = 0

    def step(name: str) -> None:
        nonlocal seen
        seen += name == wanted
        if name == wanted and seen == occurrence:
            raise error

    return step


def interrupt(options, wanted="module tensor", occurrence=3, **create) -> None:
    """Create a job and stop it at a step."""
    with (
        ConversionJob.create(options, step=stop_at(wanted, occurrence), **create) as job,
        pytest.raises(KeyboardInterrupt),
    ):
        job.run()


# -- refused before anything is written


def refused(options, message: str, error=ConversionError) -> None:
    with pytest.raises(error, match=message):
        ConversionJob.create(options)
    assert not (Path(options.out_dir) / "config.json").exists() or options.out_dir == options.in_dir
    assert not (Path(options.work_dir) / "job.json").exists()


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
    refused(job_options(source, tmp_path), r"the job needs about .* GB here, 0.00 GB are free")


def test_devices_that_are_not_there_are_refused(source, tmp_path):
    for name, message in (("cuda:9", "does not exist here"), ("gpu", "is no device")):
        refused(job_options(source, tmp_path, devices=(name,)), f"-d: .*'{name}' {message}")


def test_too_few_calibration_rows_are_refused(source, tmp_path):
    refused(job_options(source, tmp_path, cal_rows=13), "holds 12 rows, asked for 13")


def test_a_model_without_tokenizer_needs_packed_rows(source, tmp_path):
    refused(job_options(source, tmp_path, cal_data=None), "no tokenizer.json", FormatError)


# -- running


class Recorder(Silent):
    """Keeps what a job says."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.modules: list[tuple[str, bool, bool]] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def module(self, report, fidelity, resumed) -> None:
        self.modules.append((report.key, fidelity is not None, resumed))


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
    assert any(line.startswith("bits        3 asked, 3.00 achieved") for line in listener.lines)


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


# -- resuming


def test_finished_modules_are_not_quantized_again(source, tmp_path, monkeypatch):
    options = job_options(source, tmp_path, checkpoint_interval=1000)
    interrupt(options, occurrence=4)
    made: list[int] = []

    def count(weight_KN, *arguments, **named):
        made.append(weight_KN.numel())
        return stand_in_quantize(weight_KN, *arguments, **named)

    monkeypatch.setattr(pipeline, "quantize_linear", count)
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, listener=listener) as job:
        job.run()
    assert len(made) == 1  # lm_head
    assert [key for key, _, resumed in listener.modules if resumed] == [
        "model.embed_tokens", "model.layers.0", "model.layers.1",
    ]  # fmt: skip
    assert ("model.layers.0", True, True) in listener.modules  # compared again, from its file


def test_a_resumed_job_keeps_codebook_and_scales_unless_given(source, tmp_path):
    options = job_options(source, tmp_path, codebook="mcg", out_scales="never")
    interrupt(options)
    with ConversionJob.resume(options.work_dir) as job:
        assert (job.options.codebook, job.options.out_scales) == ("mcg", "never")
        job.run()
    names = TensorFiles(options.out_dir).names()
    assert not any(name.endswith(".mul1") for name in names)


def test_a_codebook_given_on_resume_counts_from_there_on_and_is_stored(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options, occurrence=3)
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, {"codebook": "mcg"}, listener=listener):
        assert any("the 2 finished modules keep theirs" in line for line in listener.lines)
    with ConversionJob.resume(options.work_dir) as job:
        job.run()
    names = TensorFiles(options.out_dir).names()
    assert "model.layers.0.mlp.up_proj.mul1" in names
    assert "model.layers.1.mlp.up_proj.mcg" in names


def test_contradicting_options_are_refused_and_the_job_stays_usable(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options)
    with pytest.raises(ConversionError, match=r"-b \(bits\) is stored as 3.0, given as 4.0"):
        ConversionJob.resume(options.work_dir, {"bits": 4.0})
    with ConversionJob.resume(options.work_dir) as job:
        job.run()


def test_a_job_resumes_after_source_work_and_output_were_moved(source, tmp_path):
    root = tmp_path / "old"
    root.mkdir()
    moved = shutil.copytree(source, root / "model")
    options = job_options(moved, root, cal_data=str(source.parent / CALIBRATION))
    interrupt(options)
    root.rename(tmp_path / "new")
    root = tmp_path / "new"
    given = {"in_dir": str(root / "model"), "out_dir": str(root / "out")}
    with ConversionJob.resume(str(root / "work"), given) as job:
        made = job.run().out_dir
    expected = convert(job_options(source, tmp_path / "whole")).out_dir
    assert folder_bytes(made) == folder_bytes(expected)


def test_another_source_is_refused_on_resume(source, tmp_path):
    options = job_options(source, tmp_path)
    interrupt(options)
    other = write_source(tmp_path / "other" / "source", seed=1)
    with pytest.raises(ConversionError, match="not the source this job was started with"):
        ConversionJob.resume(options.work_dir, {"in_dir": str(other)})


def test_the_calibration_file_is_no_longer_needed_on_resume(tmp_path):
    folder = write_source(tmp_path / "source")
    options = job_options(folder, tmp_path)
    interrupt(options)
    (tmp_path / CALIBRATION).unlink()
    with ConversionJob.resume(options.work_dir) as job:
        job.run()


def test_resuming_where_there_is_no_job_is_refused(tmp_path):
    with pytest.raises(ConversionError, match="no such folder"):
        ConversionJob.resume(str(tmp_path / "none"))
    with pytest.raises(ConversionError, match="no job to resume here"):
        ConversionJob.resume(str(tmp_path))


def test_resuming_a_finished_job_does_nothing(source, tmp_path):
    options = job_options(source, tmp_path)
    before = folder_bytes(convert(options).out_dir)
    listener = Recorder()
    with ConversionJob.resume(options.work_dir, listener=listener) as job:
        job.run()
    assert listener.lines == [f"{options.out_dir}: this job is finished already"]
    assert folder_bytes(Path(options.out_dir)) == before


def test_a_finished_job_can_be_written_again_with_another_shard_size(tmp_path):
    folder = write_source(tmp_path / "source", llama_config(vocab_size=4200))
    options = job_options(folder, tmp_path)
    first = convert(options).out_dir
    given = {"out_dir": str(tmp_path / "sharded"), "shard_size": 1}
    with ConversionJob.resume(options.work_dir, given) as job:
        second = job.run().out_dir
    one, two = TensorFiles(first), TensorFiles(second)
    assert len(two.headers) == 2
    for name in one.names():
        assert torch.equal(one.get(name), two.get(name))


def test_a_job_that_is_running_cannot_be_resumed(source, tmp_path):
    options = job_options(source, tmp_path)
    with (
        ConversionJob.create(options),
        pytest.raises(ConversionError, match="another process"),
    ):
        ConversionJob.resume(options.work_dir)


# -- side models


def multimodal(tmp_path: Path, **changes) -> Path:
    """A text decoder under text_config, an MTP head and two vision tensors."""
    text = qwen35_config(mtp_num_hidden_layers=1)
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": {k: v for k, v in text.items() if k != "architectures"},
        "vision_config": {"depth": 1},
    }
    folder = tmp_path / "source"
    write_source(folder, {**text, "architectures": ["Qwen3_5ForCausalLM"]})
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    tensors = random_tensors_of(config)
    tensors["model.visual.blocks.0.attn.qkv.weight"] = torch.randn(6, 4).bfloat16()
    tensors["model.visual.pos_embed.weight"] = torch.randn(3, 3)
    save_file(tensors, folder / "model.safetensors")
    return folder


def random_tensors_of(config: dict) -> dict[str, torch.Tensor]:
    tensors = random_tensors(config)
    if not any(name.startswith("mtp.") for name in tensors):
        # A configuration in memory has no files that could show an MTP head.
        hidden = config["text_config"]["hidden_size"]
        block = {
            name.replace("model.language_model.layers.1.", "mtp.layers.0."): tensor.clone()
            for name, tensor in tensors.items()
            if name.startswith("model.language_model.layers.1.")
        }
        tensors |= block
        tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden).bfloat16()
        for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
            tensors[f"mtp.{name}.weight"] = torch.zeros(hidden).bfloat16()
    return tensors


def test_mtp_linears_are_quantized_uncalibrated_at_their_own_rate(tmp_path):
    folder = multimodal(tmp_path)
    out = convert(job_options(folder, tmp_path, mtp_bits=5)).out_dir
    files = TensorFiles(out)
    assert files.describe("mtp.layers.0.self_attn.q_proj.trellis").shape[-1] == 16 * 5
    assert files.describe("mtp.fc.trellis").shape[-1] == 16 * 5
    section = json.loads((out / "quantization_config.json").read_text())
    assert section["mtp_bits"] == 5
    assert not any(key.startswith(("mtp.", "model.visual.")) for key in section["tensor_storage"])


def test_mtp_at_sixteen_bits_is_untouched(tmp_path):
    folder = multimodal(tmp_path)
    out = convert(job_options(folder, tmp_path, mtp_bits=16)).out_dir
    before, after = TensorFiles(folder), TensorFiles(out)
    for name in before.names():
        if name.startswith(("mtp.", "model.visual.")):
            assert after.describe(name) == before.describe(name)
            assert torch.equal(after.get(name), before.get(name))
    assert "mtp_bits" not in json.loads((out / "quantization_config.json").read_text())


def test_mtp_bits_cannot_change_once_a_part_of_the_head_is_finished(tmp_path):
    options = job_options(multimodal(tmp_path), tmp_path)
    interrupt(options, "shard tensor", 1)
    with pytest.raises(ConversionError, match="-mb cannot change any more, mtp"):
        ConversionJob.resume(options.work_dir, {"mtp_bits": 3})


# -- what was attacked once


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


def test_an_unpaired_surrogate_in_the_configuration_is_written_back(tmp_path):
    path = write_source(tmp_path / "source") / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"_name_or_path": "\ud800"}))
    convert(job_options(tmp_path / "source", tmp_path))
    written = json.loads((tmp_path / "out" / "config.json").read_bytes())
    assert written["_name_or_path"] == "\ud800"


@pytest.mark.parametrize("device", ["cpu:3", "meta"])
def test_a_device_that_is_not_there_is_refused(source, tmp_path, device):
    refused(job_options(source, tmp_path, devices=(device,)), "does not exist here; there are cpu")


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
