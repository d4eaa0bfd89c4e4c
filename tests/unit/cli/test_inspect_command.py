"""`exllamav3 inspect`: the table, the JSON form, the sums."""

import json
import shutil
from pathlib import Path

import pytest
from command_line import QUANTIZED, TRAINED, run

from exllamav3.cli.inventory import take_inventory, totals
from exllamav3.errors import FormatError
from exllamav3.topology import TensorMeta, parse_declaration

WEIGHT_KEYS = {
    "key": str,
    "kind": str,
    "shape": list,
    "dtype": str,
    "K": (int, float, type(None)),
    "codebook": (str, type(None)),
    "topology": (str, type(None)),
    "numel": int,
    "size_bytes": int,
    "tensors": list,
}


@pytest.mark.parametrize("directory", [TRAINED, QUANTIZED])
def test_inspection_as_json_has_a_fixed_form(capsys, directory):
    code, out, _ = run(capsys, "inspect", directory, "--json")
    report = json.loads(out)
    assert code == 0
    assert list(report) == [
        "directory", "architecture", "quantization", "topology", "weights", "totals",
    ]  # fmt: skip
    for weight in report["weights"]:
        assert list(weight) == list(WEIGHT_KEYS)
        assert all(isinstance(weight[key], kind) for key, kind in WEIGHT_KEYS.items())
        assert (weight["kind"] == "exl3") == (weight["K"] is not None)
    sizes = sum(weight["size_bytes"] for weight in report["weights"])
    header_bytes = 20_000
    stored = sum(path.stat().st_size for path in Path(directory).glob("*.safetensors"))
    assert sizes <= stored <= sizes + header_bytes
    assert report["totals"]["size_bytes"] == sizes


def test_inspection_shows_rate_and_codebook_of_quantized_weights(capsys):
    _, out, _ = run(capsys, "inspect", QUANTIZED, "--json")
    weights = {weight["key"]: weight for weight in json.loads(out)["weights"]}
    q = weights["model.layers.0.self_attn.q_proj"]
    assert (q["kind"], q["K"], q["codebook"], q["shape"]) == ("exl3", 4, "mcg", [256, 512])
    assert q["topology"] is None
    assert weights["lm_head"]["K"] == 6
    code, out, _ = run(capsys, "inspect", QUANTIZED)
    assert code == 0
    assert "15 EXL3 linears" in out
    assert "bits per weight: decoder 4.00, with head 4.15\n" in out


def fused_model():
    """Headers and declaration of one fused and one split block."""

    def exl3(key, rows, columns, bits, marker):
        return {
            f"{key}.trellis": TensorMeta((rows // 16, columns // 16, 16 * bits), "I16"),
            f"{key}.suh": TensorMeta((rows,), "F16"),
            f"{key}.svh": TensorMeta((columns,), "F16"),
            f"{key}.{marker}": TensorMeta((), "I32"),
        }

    tensors = {"norm.weight": TensorMeta((128,), "BF16")}
    tensors |= exl3("a.self_attn.qkv_proj", 128, 512, 6, "mcg")
    rows = [
        {
            "layer": "a.self_attn",
            "variant": "fused_uniform",
            "components": ["q_proj", "k_proj", "v_proj"],
            "output_splits": [256, 128, 128],
            "projection": {"name": "qkv_proj", "K": 6, "codebook": "mcg", "scale": "always"},
        },
        {
            "layer": "b.self_attn",
            "variant": "split",
            "components": ["q_proj", "k_proj", "v_proj"],
            "output_splits": [256, 128, 128],
            "projections": [],
        },
    ]
    for name, width, bits in (("q_proj", 256, 3), ("k_proj", 128, 4), ("v_proj", 128, 5)):
        tensors |= exl3(f"b.self_attn.{name}", 128, width, bits, "mul1")
        rows[1]["projections"].append(
            {"name": name, "K": bits, "codebook": "mul1", "scale": "always"}
        )
    return tensors, parse_declaration({"schema": "exl3_qkv_topology/1", "layers": rows}, "test")


def test_the_inventory_names_the_declared_topology_of_each_weight():
    entries = take_inventory(*fused_model())
    assert [(e.key, e.topology, e.K, e.codebook) for e in entries] == [
        ("norm.weight", None, None, None),
        ("a.self_attn.qkv_proj", "fused_uniform", 6, "mcg"),
        ("b.self_attn.q_proj", "split", 3, "mul1"),
        ("b.self_attn.k_proj", "split", 4, "mul1"),
        ("b.self_attn.v_proj", "split", 5, "mul1"),
    ]
    fused = entries[1]
    assert fused.shape == [128, 512]
    assert fused.size_bytes == 128 * 512 * 6 // 8 + 2 * (128 + 512) + 4
    weights = 128 * (512 + 256 + 128 + 128)
    bits = 128 * (512 * 6 + 256 * 3 + 128 * 4 + 128 * 5) / weights
    assert totals(entries)["bits_per_weight"]["decoder"] == pytest.approx(bits)
    assert totals(entries)["exl3_weights"] == weights


def test_a_trellis_of_no_rate_is_refused():
    tensors, _ = fused_model()
    tensors["a.self_attn.qkv_proj.trellis"] = TensorMeta((8, 32, 100), "I16")
    with pytest.raises(FormatError, match=r"qkv_proj\.trellis"):
        take_inventory(tensors, None)


@pytest.mark.parametrize("shape", [(), (8,), (8, 64), (1, 8, 8, 64)])
def test_a_trellis_of_another_rank_is_refused(shape):
    tensors = {"a.trellis": TensorMeta(shape, "I16")}
    tensors |= {f"a.{name}": TensorMeta((128,), "F16") for name in ("suh", "svh")}
    with pytest.raises(FormatError, match=r"a\.trellis: has shape .*expected 3 dimensions"):
        take_inventory(tensors, None)


def test_an_inventory_of_other_tensors_is_a_warning(capsys, tmp_path):
    folder = shutil.copytree(QUANTIZED, tmp_path / "model")
    path = folder / "quantization_config.json"
    obj = json.loads(path.read_text())
    obj["tensor_storage"]["lm_head"]["bits_per_weight"] = 5
    path.write_text(json.dumps(obj))
    code, out, err = run(capsys, "inspect", str(folder))
    assert code == 0
    assert "EXL3 linears" in out
    assert err.startswith(f"warning: {path}.tensor_storage['lm_head'].bits_per_weight: says 5")
    assert err.count("\n") == 1
    path.write_text("")
    assert "quantization_config.json: not JSON" in run(capsys, "inspect", str(folder))[2]


@pytest.mark.parametrize("directory", [TRAINED, QUANTIZED])
def test_a_whole_folder_is_inspected_without_a_warning(capsys, directory):
    assert run(capsys, "inspect", directory)[::2] == (0, "")
