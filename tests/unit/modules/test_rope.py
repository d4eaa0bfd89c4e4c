import cmath
import json

import pytest
import torch

from exllamav3.model.fields import Fields
from exllamav3.model.rope_config import read_rope
from exllamav3.modules.context import ForwardContext
from exllamav3.modules.rope import Rope, RopeSettings


@pytest.mark.parametrize("name", ["linear", "llama3", "yarn", "yarn-all", "yarn-stated"])
def test_frequencies_are_those_of_transformers(data_dir, name):
    case = json.loads((data_dir / "rope_frequencies.json").read_text())["cases"][name]
    text = Fields(
        {
            "rope_parameters": case["parameters"],
            "max_position_embeddings": case["max_position_embeddings"],
        },
        "config.json",
    )
    settings = read_rope(text, case["head_dim"])
    assert settings.attention_factor == pytest.approx(case["attention_factor"], rel=1e-12)
    # float32 arithmetic in another order
    expected = torch.tensor(case["inv_freq"])
    torch.testing.assert_close(settings.inv_freq(), expected, rtol=2e-6, atol=0)


def test_a_lane_turns_with_its_partner_half_the_rotary_width_away():
    rope = Rope(RopeSettings(theta=100.0, rotary_dim=4))
    x = torch.tensor([[[[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]]])
    ctx = ForwardContext(positions=torch.tensor([[3]]))
    y = rope.apply(x, ctx)[0, 0, 0].tolist()
    first = complex(1, 3) * cmath.exp(3j * 100.0**0)
    second = complex(2, 4) * cmath.exp(3j * 100.0**-0.5)
    expected = [first.real, second.real, first.imag, second.imag, 5.0, 6.0]
    assert y == pytest.approx(expected, rel=1e-6)


def test_the_table_is_made_once_a_pass_and_shared_by_all_layers():
    rope = Rope(RopeSettings(theta=100.0, rotary_dim=4))
    ctx = ForwardContext.uncached(1, 5)
    assert rope.table(ctx)[0] is rope.table(ctx)[0]
    assert rope.table(ForwardContext.uncached(1, 5))[0] is not rope.table(ctx)[0]


def test_rows_at_different_positions_turn_by_their_own_angle():
    rope = Rope(RopeSettings(theta=100.0, rotary_dim=8))
    x = torch.randn(1, 6, 2, 8)
    whole = rope.apply(x, ForwardContext.uncached(1, 6))
    rows = torch.stack([x[0, 1:3], x[0, 4:6]])
    part = rope.apply(rows, ForwardContext(positions=torch.tensor([[1, 2], [4, 5]])))
    assert torch.equal(part, torch.stack([whole[0, 1:3], whole[0, 4:6]]))
