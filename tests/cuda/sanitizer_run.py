#!/usr/bin/env python3
"""Every CUDA operator once or twice on small arguments, for compute-sanitizer.

    compute-sanitizer --tool memcheck  python tests/cuda/sanitizer_run.py
    compute-sanitizer --tool racecheck python tests/cuda/sanitizer_run.py

Prints one line for each operator; the tool reports what it finds and sets its exit code with
`--error-exitcode 1`.
"""

from __future__ import annotations

import torch

from exllamav3 import ops

CODES = ((4, 2), (3, 2), (8, 2), (2.5, 2), (4, 1), (5, 0))


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    for bits, codebook in CODES:
        trellis = torch.randint(-32768, 32768, (40, 24, int(16 * bits)), generator=generator)
        trellis = trellis.to(torch.int16).cuda()
        suh, svh = (torch.randn(n, generator=generator).half().cuda() for n in (640, 384))
        for rows in (1, 2, 5, 16, 40):
            x = torch.randn(rows, 640, generator=generator).half().cuda()
            ops.exl3_linear(x, trellis, suh, svh, svh, codebook)
            ops.exl3_linear_group(x, [trellis] * 2, [suh] * 2, [svh] * 2, [codebook] * 2)
        ops.pack(ops.unpack(trellis), bits)
        ops.decode(trellis, codebook)
        ops.reconstruct(trellis, suh, svh, codebook, torch.float16)
        torch.ops.exllamav3.reconstruct_columns(trellis, suh, svh, codebook)
        torch.ops.exllamav3.rotate_input(x, suh)
        torch.cuda.synchronize()
        print(
            f"K={bits} codebook {codebook}: linear, group, pack, unpack, decode, reconstruct, "
            "factors"
        )
    ops.hadamard(torch.randn(3, 256).cuda(), torch.randn(256).cuda(), None)
    ops.deinterleave_qg(torch.randn(2, 3, 64).half().cuda(), 16)
    for tokens in (1, 19):
        q, k = torch.randn(2, 2, tokens, 2, 128).cuda()
        v, gates = torch.randn(2, tokens, 4, 128).cuda(), torch.rand(2, tokens, 4).cuda()
        ops.gated_delta_rule(q, k, v, -gates, gates, torch.randn(2, 4, 128, 128).cuda())
    torch.cuda.synchronize()
    print("hadamard, deinterleave_qg, gated_delta_rule")


if __name__ == "__main__":
    main()
