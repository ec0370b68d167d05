"""Chats to prompt texts, by the template that comes with the checkpoint, in a sandbox (the conventions of `transformers`)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import ext
from jinja2.sandbox import ImmutableSandboxedEnvironment

from latentpool.errors import CheckpointError, RequestError
from latentpool.v1 import router_pb2

TEMPLATE, CONFIG = "chat_template.jinja", "tokenizer_config.json"
_PLAIN_ROLES = frozenset(("system", "user", "assistant"))
_PROBE = "probe-4b1f"


@dataclass(frozen=True, slots=True)
class Rendered:
    """A chat's prompt, and that of the messages before the newest one of the user ("" where there are none)."""

    text: str
    before: str


class ChatTemplate:
    """A checkpoint's template, or its absence. It comes with the weights: it runs in a sandbox and can only make text."""

    def __init__(self, model: Path | None) -> None:
        """Reads `model`/chat_template.jinja, or else chat_template of `model`/tokenizer_config.json. Raises CheckpointError
        where a file cannot be read, or is no template."""
        self._default: jinja2.Template | None = None
        self._with_tools: jinja2.Template | None = None
        self._special: dict[str, str] = {}
        if model is None:
            return
        config = _read_config(model / CONFIG)
        self._special = {name: text for name, value in config.items() if (text := _special(name, value)) is not None}
        sources = _sources(model, config)
        if "default" in sources:
            self._default = _compile(*sources["default"])
            self._with_tools = _compile(*sources.get("tool_use", sources["default"]))

    def render(self, chat: router_pb2.Chat) -> Rendered:
        """Raises RequestError where there is no template, and for what the template does not take."""
        if self._default is None:
            raise RequestError(
                f"chat: this checkpoint has no chat template (no {TEMPLATE}, and no chat_template in {CONFIG}): send text or "
                "token_ids",
                field="chat",
            )
        messages, tools = _messages(chat), _tools(chat.tools)
        text = self._text(messages, tools, prompt=True)
        self._check_roles(messages, tools)
        return Rendered(text, self._before(messages, tools))

    def _before(self, messages: Sequence[Mapping[str, str]], tools: list[Any] | None) -> str:
        newest = max((i for i, message in enumerate(messages) if message["role"] == "user"), default=-1)
        if newest < 0:
            return ""
        try:
            return self._text(messages[:newest], tools, prompt=False)
        except RequestError:  # a template that does not take a chat without a user
            return ""

    def _check_roles(self, messages: Sequence[Mapping[str, str]], tools: list[Any] | None) -> None:
        """A role that the template passes over would be silence where the caller said something."""
        first = {message["role"]: i for i, message in reversed(list(enumerate(messages)))}
        for role in first.keys() - _PLAIN_ROLES:
            try:
                shown = self._text([{"role": "user", "content": ""}, {"role": role, "content": _PROBE}], tools, prompt=False)
            except RequestError:  # it has to stand elsewhere, and where it stood it was taken
                continue
            if _PROBE not in shown:
                raise RequestError(
                    f"chat.messages[{first[role]}].role = {role!r}: the checkpoint's chat template knows no such role",
                    field=f"chat.messages[{first[role]}].role",
                )

    def _text(self, messages: Sequence[Mapping[str, str]], tools: list[Any] | None, *, prompt: bool) -> str:
        template = self._with_tools if tools else self._default
        assert template is not None
        try:
            return template.render(messages=messages, tools=tools, add_generation_prompt=prompt, **self._special)
        except jinja2.TemplateError as error:
            raise RequestError(f"chat: the checkpoint's chat template says: {error.message or error}", field="chat") from None
        except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
            raise RequestError(
                f"chat: the checkpoint's chat template fails at these messages: {type(error).__name__}: {error}", field="chat"
            ) from None


# ---- what requests hold ---------------------------------------------------------------------------------------------


def _messages(chat: router_pb2.Chat) -> list[dict[str, str]]:
    if not chat.messages:
        raise RequestError("chat.messages: send at least one message", field="chat.messages")
    for i, message in enumerate(chat.messages):
        if not message.role:
            raise RequestError(
                f"chat.messages[{i}].role is empty: system, user, assistant, or what the checkpoint's chat template knows",
                field=f"chat.messages[{i}].role",
            )
    return [{"role": message.role, "content": message.content} for message in chat.messages]


def _tools(text: str) -> list[Any] | None:
    if not text:
        return None
    try:
        tools = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"chat.tools is not JSON: {error}", field="chat.tools") from None
    if not isinstance(tools, list):
        raise RequestError(f"chat.tools is a JSON {type(tools).__name__}: send a list of tools", field="chat.tools")
    return tools or None


# ---- what checkpoints hold ------------------------------------------------------------------------------------------


def _read_config(path: Path) -> dict[str, Any]:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: is no JSON object")
    return config


def _special(name: str, value: Any) -> str | None:
    """Templates know the tokenizer's special tokens (bos_token, eos_token, ...) by name."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if name.endswith("_token") and isinstance(text, str) else None


def _sources(model: Path, config: Mapping[str, Any]) -> dict[str, tuple[Path, str]]:
    """Templates by name, each with the file it stands in. One template is that of all chats."""
    path = model / TEMPLATE
    try:
        return {"default": (path, path.read_text(encoding="utf-8"))}
    except FileNotFoundError:
        pass
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    path, told = model / CONFIG, config.get("chat_template")
    if told is None:
        return {}
    if isinstance(told, str):
        return {"default": (path, told)}
    try:
        return {one["name"]: (path, one["template"]) for one in told}
    except (TypeError, KeyError):
        raise CheckpointError(f"{path}: chat_template is neither a template nor a list of named ones") from None


def _compile(path: Path, source: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols])
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"{path}: is no chat template: {error}") from None


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    """Unlike Jinja's own, it escapes no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)
