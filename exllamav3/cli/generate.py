"""`exllamav3 generate DIR PROMPT`: continue a prompt, printing the text as it comes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import torch

from exllamav3.cache import PAGE_SIZE, Cache
from exllamav3.cli.arguments import (
    add_runtime_options,
    build_model,
    count,
    load_model,
    number,
    positive_int,
)
from exllamav3.errors import FormatError
from exllamav3.generator import ComboSampler, DefaultSampler, Generator, GreedySampler, Job, Sampler
from exllamav3.generator.job import Result
from exllamav3.generator.sampling_steps import LARGEST
from exllamav3.tokenizer import Tokenizer


def main(argv: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    parser = _parser()
    arguments = parser.parse_args(argv)
    if arguments.system is not None and not arguments.chat:
        parser.error("--system is the system message of a chat: give --chat too")
    sampler = _sampler(arguments)
    model = build_model(arguments.directory)
    tokenizer = Tokenizer.from_config(model.config)
    prompt = _read_stdin() if arguments.prompt == "-" else arguments.prompt
    ids = _prompt_ids(tokenizer, prompt, arguments)
    job = Job(
        ids,
        arguments.max_new_tokens,
        sampler=sampler,
        stop_conditions=arguments.stop,
        ignore_eos=arguments.ignore_eos,
        seed=arguments.seed,
    )
    pages = -(-(len(ids) + arguments.max_new_tokens) // PAGE_SIZE)
    cache = Cache(model, max_num_tokens=pages * PAGE_SIZE, max_batch_size=1)
    load_model(model, arguments)
    generator = Generator(model=model, cache=cache, tokenizer=tokenizer)
    generator.enqueue(job)
    if not arguments.completion_only:
        print(prompt, end="", flush=True)
    last = _run(generator)
    print()
    if not arguments.quiet:
        print(_statistics(last, job), file=sys.stderr)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="exllamav3 generate",
        description="Continue a prompt. The text goes to stdout, statistics to stderr.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("directory", help="model folder")
    add("prompt", help='text to continue; "-" reads it from stdin')
    add("-n", "--max-new-tokens", type=positive_int, default=128, help="default: 128")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add("--system", help="system message for --chat")
    add("--add-bos", action="store_true", help="begin with BOS, if the model has one")
    add("--completion-only", action="store_true", help="do not repeat the prompt")
    add("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    add("--ignore-eos", action="store_true", help="go on after an end-of-text token")
    add("--seed", type=int, help="of the random choices; default: another each time")
    add("--quiet", action="store_true", help="no statistics")
    sampling = parser.add_argument_group("sampling", "default: min-p 0.08, then temperature 0.8")
    add = sampling.add_argument
    add("--greedy", action="store_true", help="always the likeliest token")
    signed = number(-LARGEST, LARGEST)
    add("--temperature", type=number(0, LARGEST))
    add("--min-p", type=number(0, 1))
    add("--top-k", type=count)
    add("--top-p", type=number(0, 1))
    add("--repetition-penalty", type=number(0, LARGEST, above_low=True), metavar="P")
    add("--presence-penalty", type=signed, metavar="P")
    add("--frequency-penalty", type=signed, metavar="P")
    add_runtime_options(parser)
    return parser


def _sampler(arguments: argparse.Namespace) -> Sampler:
    """Greedy, or the given settings with neutral ones for the rest, or the default."""
    names = {
        "temperature": "temperature",
        "min_p": "min_p",
        "top_k": "top_k",
        "top_p": "top_p",
        "rep_p": "repetition_penalty",
        "pres_p": "presence_penalty",
        "freq_p": "frequency_penalty",
    }
    given = {k: getattr(arguments, v) for k, v in names.items()}
    given = {k: v for k, v in given.items() if v is not None}
    if arguments.greedy:
        given["temperature"] = 0.0
    if given == {"temperature": 0.0}:
        return GreedySampler()
    return ComboSampler(**given) if given else DefaultSampler()


def _read_stdin() -> str:
    try:
        return sys.stdin.read()
    except UnicodeDecodeError as error:
        raise FormatError(f"stdin: the prompt is not text ({error}); give it as UTF-8") from error


def _prompt_ids(tokenizer: Tokenizer, prompt: str, arguments: argparse.Namespace) -> list[int]:
    if not arguments.chat:
        return tokenizer.encode_ids(prompt, add_bos=arguments.add_bos)
    messages = [{"role": "user", "content": prompt}]
    if arguments.system is not None:
        messages.insert(0, {"role": "system", "content": arguments.system})
    return tokenizer.encode_ids(tokenizer.format_chat(messages), encode_special_tokens=True)


def _run(generator: Generator) -> Result:
    last: Result = {}
    while generator.num_remaining_jobs():
        for last in generator.iterate():
            print(last.get("text", ""), end="", flush=True)
    return last


def _statistics(last: Result, job: Job) -> str:
    prefill = last["prompt_tokens"] / max(last["time_prefill"], 1e-9)
    # The first token comes out of the prompt's own pass.
    decode = (last["new_tokens"] - 1) / max(last["time_generate"], 1e-9)
    return (
        f"{last['prompt_tokens']} prompt tokens, {prefill:.1f}/s; {last['new_tokens']} new tokens, "
        f"{decode:.1f}/s; ended by {last['eos_reason']}; seed {job.seed}; "
        f"torch {torch.__version__}, {torch.get_num_threads()} threads"
    )
