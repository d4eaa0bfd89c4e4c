import pytest

from exllamav3.errors import FormatError, UnsupportedError
from exllamav3.model.fields import Fields
from exllamav3.model.rope_config import read_rope


def read(head_dim=64, partial_default=1.0, **config):
    fields = {"max_position_embeddings": 4096} | config
    return read_rope(Fields(fields, "config.json"), head_dim, partial_default)


def test_the_newer_spelling_is_read():
    settings = read(
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e7,
            "partial_rotary_factor": 0.25,
            "mrope_section": [11, 11, 10],
            "mrope_interleaved": True,
        },
        head_dim=256,
    )
    assert (settings.rope_type, settings.theta, settings.rotary_dim) == ("default", 1e7, 64)


def test_the_older_spelling_is_read_where_the_newer_is_absent():
    settings = read(
        rope_theta=5e5, partial_rotary_factor=0.5, rope_scaling={"type": "linear", "factor": 2.0}
    )
    assert (settings.rope_type, settings.theta, settings.rotary_dim) == ("linear", 5e5, 32)
    assert settings.factor == 2.0


def test_older_keys_fill_what_the_newer_does_not_state():
    assert read(rope_parameters={"rope_type": "default"}, rope_theta=5e5).theta == 5e5


def test_equal_values_in_both_spellings_are_no_contradiction():
    assert read(rope_parameters={"rope_theta": 5e5}, rope_theta=500000).theta == 5e5


@pytest.mark.parametrize(
    "older",
    [
        {"rope_theta": 10000.0},
        {"partial_rotary_factor": 0.5},
        {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}},
        {"rope_scaling": {"type": "linear"}},
    ],
)
def test_a_contradiction_between_the_two_is_an_error(older):
    newer = {"rope_theta": 5e5, "rope_type": "default", "partial_rotary_factor": 1.0}
    with pytest.raises(FormatError, match="but the older keys of the same file say"):
        read(rope_parameters=newer, **older)


def test_two_names_of_the_type_must_agree():
    with pytest.raises(FormatError, match="type is 'linear' and rope_type is 'yarn'"):
        read(rope_scaling={"type": "linear", "rope_type": "yarn", "factor": 2.0})


def test_nothing_stated_means_the_customary_base_and_the_default_share():
    settings = read(partial_default=0.25)
    assert (settings.theta, settings.rotary_dim) == (10000.0, 16)


@pytest.mark.parametrize("name", ["dynamic", "longrope", "su", "axial"])
def test_an_unknown_type_is_refused(name):
    with pytest.raises(UnsupportedError, match=f"{name!r} is not implemented"):
        read(rope_parameters={"rope_type": name, "rope_theta": 1e4})


def test_settings_for_each_kind_of_layer_are_refused():
    with pytest.raises(UnsupportedError, match=r"rope_parameters\.full_attention"):
        read(rope_parameters={"full_attention": {"rope_type": "yarn", "factor": 2.0}})


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "factor: missing"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor: missing"),
        ({"rope_theta": "1e4"}, "rope_theta: is '1e4', expected a number"),
        ({"partial_rotary_factor": 1.5}, "96 lanes, expected an even number from 2 to 64"),
        ({"partial_rotary_factor": 0.02}, "1 lanes, expected"),
    ],
)
def test_a_missing_or_wrong_value_is_an_error(parameters, message):
    with pytest.raises(FormatError, match=message):
        read(rope_parameters=parameters)


def test_the_length_before_extension_is_found_where_files_put_it():
    scaling = {"rope_type": "yarn", "factor": 2.0}
    assert read(rope_scaling=scaling).original_max_positions == 4096
    stated = scaling | {"original_max_position_embeddings": 2048}
    assert read(rope_scaling=stated).original_max_positions == 2048
    beside = read(rope_scaling=scaling, original_max_position_embeddings=1024)
    assert beside.original_max_positions == 1024


LLAMA3 = {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}


@pytest.mark.parametrize(
    ("rope", "key"),
    [
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_theta": 1}, "rope_theta"),
        ({"rope_theta": float("nan")}, "rope_theta"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_theta": 10**400}, "rope_theta"),
        ({"rope_type": "linear", "factor": 0}, "factor"),
        ({"rope_type": "yarn", "factor": -1}, "factor"),
        ({"rope_type": "yarn", "factor": 4, "beta_fast": 0}, "beta_fast"),
        (LLAMA3 | {"high_freq_factor": 1}, "high_freq_factor"),
        (LLAMA3 | {"low_freq_factor": -1}, "low_freq_factor"),
    ],
)
def test_a_number_that_gives_no_usable_angles_is_refused(rope, key):
    with pytest.raises(FormatError, match=rf"rope_parameters\.{key}: is .*, expected a number"):
        read(rope_parameters=rope)
