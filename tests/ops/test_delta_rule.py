"""The gated delta rule against its definition, and its contract."""

import pytest
import torch
from samples import random_delta_inputs, relative_error

from exllamav3 import ops
from exllamav3.errors import FormatError
from exllamav3.ops.reference.delta_rule import gated_delta_rule as reference


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": 1, "tokens": 1, "k_heads": 1, "v_heads": 1},
        {"batch": 2, "tokens": 7, "k_heads": 2, "v_heads": 4},
        {"batch": 1, "tokens": 3, "k_heads": 2, "v_heads": 6, "dk": 128, "dv": 128},
        {"batch": 1, "tokens": 4, "k_heads": 3, "v_heads": 3, "dk": 5, "dv": 7},
    ],
)
def test_kernel_is_the_reference_up_to_float32_rounding(sizes):
    inputs = random_delta_inputs(**sizes)
    out, state = ops.gated_delta_rule(*inputs)
    expected_out, expected_state = reference(*inputs)
    assert relative_error(out, expected_out) < 1e-6
    assert relative_error(state, expected_state) < 1e-6


def test_tokens_in_two_calls_are_the_same_as_in_one():
    inputs = random_delta_inputs(tokens=9)
    out, state = ops.gated_delta_rule(*inputs)
    first = [t[:, :4] for t in inputs[:5]]
    rest = [t[:, 4:] for t in inputs[:5]]
    first_out, middle = ops.gated_delta_rule(*first, inputs.state)
    rest_out, end = ops.gated_delta_rule(*rest, middle)
    assert torch.equal(torch.cat([first_out, rest_out], 1), out)
    assert torch.equal(end, state)


def test_the_given_state_is_not_modified():
    inputs = random_delta_inputs()
    before = inputs.state.clone()
    ops.gated_delta_rule(*inputs)
    assert torch.equal(inputs.state, before)


def test_no_tokens_leave_the_state_as_it_is():
    inputs = random_delta_inputs(tokens=0)
    out, state = ops.gated_delta_rule(*inputs)
    assert out.shape == (2, 0, 4, 48)
    assert torch.equal(state, inputs.state)


def test_output_has_the_dtype_of_v_and_the_state_stays_float32():
    inputs = random_delta_inputs()
    halves = [t.half() for t in inputs[:3]]
    out, state = ops.gated_delta_rule(*halves, *inputs[3:])
    assert (out.dtype, state.dtype) == (torch.float16, torch.float32)


def test_result_does_not_depend_on_the_number_of_threads():
    inputs = random_delta_inputs()
    torch.set_num_threads(1)
    one = ops.gated_delta_rule(*inputs)
    torch.set_num_threads(2)
    two = ops.gated_delta_rule(*inputs)
    assert torch.equal(one[0], two[0])
    assert torch.equal(one[1], two[1])


def test_states_kept_elsewhere_are_advanced_in_place(device):
    inputs = [t.to(device) for t in random_delta_inputs(batch=3)]
    states = torch.full((6, 4, 32, 48), torch.nan, device=device)
    slots, is_new = torch.tensor([4, 0, 3], device=device), torch.tensor([False, True, False])
    states[slots] = inputs[5]
    states[0] = torch.nan  # what an earlier sequence left
    inputs[5][1] = 0
    expected_out, expected = ops.gated_delta_rule(*inputs)
    out = ops.advance_delta_rule(*inputs[:5], states, slots, is_new.to(device))
    assert torch.equal(out, expected_out)
    assert torch.equal(states[slots], expected)
    assert states[[1, 2, 5]].isnan().all()


def test_states_elsewhere_are_checked():
    inputs = random_delta_inputs()
    states, slots = torch.zeros(4, 4, 32, 48), torch.tensor([0, 1])
    with pytest.raises(FormatError, match="is_new has shape"):
        ops.advance_delta_rule(*inputs[:5], states, slots, torch.zeros(3, dtype=torch.bool))
    with pytest.raises(FormatError, match="expected contiguous"):
        ops.advance_delta_rule(
            *inputs[:5], states.transpose(0, 1), slots, torch.zeros(2, dtype=torch.bool)
        )
