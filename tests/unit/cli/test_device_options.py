"""Where a model runs, as `generate` and `eval` are told."""

import pytest
from command_line import QUANTIZED, TRAINED, run

from exllamav3.cli.main import main

GENERATE = ("generate", TRAINED, "The king said", "-n", "3", "--greedy", "--quiet")


def test_one_device_can_be_named_either_way(capsys):
    outputs = [run(capsys, *GENERATE, *where) for where in (("--device=cpu",), ("-d", "cpu"))]
    assert outputs[0] == outputs[1]
    assert outputs[0][0] == 0


@pytest.mark.parametrize("command", [GENERATE, ("eval", QUANTIZED, "--rows=1", "--cols=8")])
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["-d", "98,99"], "devices: 'cuda:98' does not exist here; GPUs here: "),
        (["--devices=98,98"], "devices: 'cuda:98' does not exist here"),
        (["-d", "cpu,0"], "devices: 'cpu' is no GPU, and layers are split over GPUs only"),
        (["-d", "tpu,0"], "devices: 'tpu' is not one that torch knows"),
        (["-d", "meta"], "device meta: it computes nothing"),
        (["--use-per-device=1,2"], "use_per_device is given without the devices"),
        (["-d", "cpu", "--use-per-device=1"], "devices: 'cpu' is no GPU"),
    ],
)
def test_devices_that_cannot_be_are_one_line_and_exit_code_1(capsys, command, options, message):
    code, out, err = run(capsys, *command, *options)
    assert (code, out) == (1, "")
    assert err.startswith(f"error: {message}")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--device=cpu", "-d=cpu"], "not allowed with argument"),
        (["-d", "0,,1"], "argument -d/--devices: '0,,1': expected cpu, or numbers such as 0,1"),
        (["--use-per-device=1,x"], "argument --use-per-device: 'x' is not a number"),
        (["--use-per-device=1,nan"], "argument --use-per-device: nan is not a number from 0"),
    ],
)
def test_lists_that_are_none_are_wrong_usage_that_names_the_option(capsys, options, message):
    with pytest.raises(SystemExit) as stopped:
        main([*GENERATE, *options])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
