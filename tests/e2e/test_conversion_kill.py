"""A job that is killed and resumed makes the same bytes as one that is left alone.

The children are forked from a server that has the library loaded, so that a
run costs a fraction of a second; they end by SIGKILL, so nothing of Python's
clean-up can help.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
from conversion_support import folder_bytes, job_options, run_in_child, write_source
from exllamav3.conversion.job_folder import STEPS
from tiny_models import llama_config

PLAN = {
    "schema": "exl3_qkv_topology/1",
    "layers": [
        {
            "layer": "model.layers.1.self_attn",
            "variant": "fused_uniform",
            "K": 4,
            "codebook": "mcg",
            "scale": "never",
        }
    ],
}
POINTS = [
    ("module tensor", 1),
    ("module tensor", 3),
    ("module tensor", 5),
    ("checkpoint tensor", 1),
    ("checkpoint tensor", 3),
    ("checkpoint complete", 2),
    ("checkpoint old removed", 3),
    ("checkpoint set aside", 1),
    ("checkpoint set aside", 3),
    ("checkpoint in place", 2),
    ("shard tensor", 1),
    ("shard tensor", 2),
    ("shards in place", 1),
    ("side file", 1),
    ("before config.json", 1),
    ("before finished", 1),
]
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def server():
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["conversion_support"])
    return context


class Harness:
    """One source, and what an uninterrupted job makes of it."""

    def __init__(self, server, root: Path) -> None:
        self.server = server
        self.root = root
        # The embedding alone fills a shard of one MiB, the least there is.
        config = llama_config(intermediate_size=128, num_hidden_layers=3, vocab_size=4200)
        self.source = write_source(root / "source", config)
        (self.source / "README.md").write_text("side file")
        self.plan = root / "plan.json"
        self.plan.write_text(json.dumps(PLAN))
        start = time.monotonic()
        assert self.run("whole", resume=False) == 0
        self.seconds = time.monotonic() - start
        self.expected = folder_bytes(root / "whole" / "out")

    def start(self, name: str, resume: bool, kill_at: tuple[str, int] | None):
        options = job_options(self.source, self.root / name, shard_size=1)
        arguments = (options, resume, str(self.plan), kill_at)
        process = self.server.Process(target=run_in_child, args=arguments)
        process.start()
        return process

    def run(self, name: str, resume: bool, kill_at: tuple[str, int] | None = None) -> int:
        process = self.start(name, resume, kill_at)
        process.join(TIMEOUT_S)
        assert not process.is_alive()
        return process.exitcode

    def check(self, name: str) -> None:
        assert folder_bytes(self.root / name / "out") == self.expected
        shutil.rmtree(self.root / name)


@pytest.fixture(scope="module")
def harness(server, tmp_path_factory) -> Harness:
    return Harness(server, tmp_path_factory.mktemp("kill"))


def test_every_step_of_a_job_is_one_at_which_it_is_killed():
    assert {point for point, _ in POINTS} == set(STEPS)


def test_the_uninterrupted_output_is_complete(harness):
    assert {"config.json", "quantization_config.json", "README.md"} <= harness.expected.keys()
    assert not any(name.startswith(".") for name in harness.expected)


@pytest.mark.parametrize(("point", "occurrence"), POINTS)
def test_killed_at_a_step_and_resumed_the_job_makes_the_same_bytes(harness, point, occurrence):
    assert harness.run("killed", resume=False, kill_at=(point, occurrence)) == -signal.SIGKILL
    assert not (harness.root / "killed" / "out" / "config.json").exists() or point in (
        "before finished",
    )
    assert harness.run("killed", resume=True) == 0
    harness.check("killed")


def test_killed_again_and_again_the_job_makes_the_same_bytes(harness):
    kills = [("module tensor", 2), ("checkpoint set aside", 1), ("shard tensor", 1)]
    for number, kill_at in enumerate(kills):
        assert harness.run("often", resume=number > 0, kill_at=kill_at) == -signal.SIGKILL
    assert harness.run("often", resume=True) == 0
    harness.check("often")


@pytest.mark.parametrize("moment", range(10))
def test_killed_at_a_random_moment_and_resumed_the_job_makes_the_same_bytes(harness, moment):
    name = f"random{moment}"
    # Stratified, so that ten moments cover the whole run; the jitter differs every time.
    delay = harness.seconds * (moment + random.random()) / 10
    process = harness.start(name, False, None)
    time.sleep(delay)
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    process.join(TIMEOUT_S)
    stored = (harness.root / name / "work" / "job.json").exists()
    assert harness.run(name, resume=stored) == 0, f"killed after {delay:.3f} s"
    harness.check(name)
