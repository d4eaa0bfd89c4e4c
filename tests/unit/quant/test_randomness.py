import torch

from exllamav3.quant.randomness import Stream, random_signs


def test_signs_depend_on_seed_and_stream_for_seeds_of_any_size():
    drawn = [
        random_signs(256, seed, stream)
        for seed in (0, 1, 2**62 + 12345, 2**63 - 1)  # torch looks at the low 32 bits
        for stream in (Stream.INPUT_SIGNS, Stream.OUTPUT_SIGNS)
    ]
    for index, signs in enumerate(drawn):
        assert set(signs.tolist()) == {-1.0, 1.0}
        assert not any(torch.equal(signs, other) for other in drawn[:index])
