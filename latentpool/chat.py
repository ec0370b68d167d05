"""Chat messages to prompt text, by the checkpoint's own chat_template.jinja in a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from latentpool.errors import CheckpointError, RequestError

TEMPLATE = "chat_template.jinja"


class ChatTemplate:
    """A checkpoint's template. It comes with the weights, so it is run in a sandbox: it can only make text."""

    def __init__(self, model: Path) -> None:
        """Reads `model`/chat_template.jinja. Raises CheckpointError if there is none, or it is no template."""
        path = model / TEMPLATE
        try:
            self._template = ImmutableSandboxedEnvironment().from_string(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeError) as error:
            raise CheckpointError(f"{path}: cannot be read: {error}") from None
        except TemplateError as error:
            raise CheckpointError(f"{path}: is not a template: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt after which the assistant speaks. A message has a `role` and a `content`; `variables` are what else the
        template knows (tools, reasoning_effort, ...). Raises RequestError in the template's words."""
        try:
            return self._template.render(messages=messages, add_generation_prompt=True, **variables)
        except TemplateError as error:
            raise RequestError(f"messages: {error}", field="messages") from None
