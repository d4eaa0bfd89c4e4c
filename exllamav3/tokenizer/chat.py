"""Chat templates: Jinja programs that come with a model and lay out a conversation.

A template is code from the model's author, so it runs in Jinja's immutable sandbox:
no access to attributes with underscores, none to Python objects outside its variables.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from exllamav3.errors import FormatError

Message = Mapping[str, Any]
"""One turn: `{"role": "user", "content": "..."}`; a template may know further keys."""


def read_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """Find the template of a model: `chat_template.jinja`, else the tokenizer configuration.

    Returns:
        The source of the template called "default" where there are several; None for a model
        without any.

    Raises:
        FormatError: the entry in the configuration is neither a string nor a list of templates.
    """
    path = directory / "chat_template.jinja"
    if path.exists():
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise FormatError(f"{path}: not UTF-8 ({error}); restore the file") from error
    entry = tokenizer_config.get("chat_template")
    if entry is None or isinstance(entry, str):
        return entry
    if isinstance(entry, list) and all(isinstance(item, dict) for item in entry):
        default = next((i.get("template") for i in entry if i.get("name") == "default"), None)
        if isinstance(default, str):
            return default
    raise FormatError(
        f"{directory / 'tokenizer_config.json'}: chat_template must be a string or a list of "
        f'{{"name", "template"}} objects with one named "default"'
    )


def render_chat_template(
    template: str,
    messages: Sequence[Message],
    add_generation_prompt: bool,
    variables: Mapping[str, Any],
) -> str:
    """Run a chat template.

    Args:
        template: Jinja source.
        messages: the conversation, oldest turn first.
        add_generation_prompt: end with the opening of the assistant's turn.
        variables: what else the template may use (`bos_token`, `tools`, `enable_thinking`, ...).

    Raises:
        FormatError: the template is malformed or refuses the conversation.
    """
    try:
        return (
            _environment()
            .from_string(template)
            .render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        )
    except TemplateError as error:
        raise FormatError(
            f"chat template: {error}; check the roles and the order of the messages, or format "
            f"the prompt yourself"
        ) from error


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    # The names below are what published templates expect.
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now(tz=timezone.utc).strftime(pattern)
