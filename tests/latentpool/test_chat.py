"""Chat messages as prompt text, by the bundled template: the release's conventions."""

from __future__ import annotations

from pathlib import Path

import pytest

import latentpool
from latentpool.chat import ChatTemplate
from latentpool.errors import CheckpointError, RequestError

BUNDLED = Path(latentpool.__file__).parent / "checkpoints" / "demo"
START = "[gMASK]<sop><|system|>Reasoning Effort: "
CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello.", "reasoning_content": "A greeting."},
    {"role": "user", "content": [{"type": "text", "text": "Who"}, {"type": "text", "text": " are you?"}]},
]


def test_roles_follow_one_another_without_newlines() -> None:
    tail = "<|user|>Who are you?<|assistant|><think>"
    told = ChatTemplate(BUNDLED).render(CHAT)
    assert told == f"{START}Max<|system|>Be kind.<|user|>Hi<|assistant|><think>A greeting.</think>Hello.{tail}"
    told = ChatTemplate(BUNDLED).render(CHAT, clear_thinking=True, reasoning_effort="low")
    assert told == f"{START}Low<|system|>Be kind.<|user|>Hi<|assistant|><think></think>Hello.{tail}"


def test_tools_their_calls_and_results() -> None:
    call = {"function": {"name": "find", "arguments": {"what": "key", "count": 2}}}
    chat = [
        CHAT[1],
        {"role": "assistant", "content": "", "reasoning_content": "Look.", "tool_calls": [call]},
        {"role": "tool", "content": "one"},
        {"role": "tool", "content": "two"},
    ]
    told = ChatTemplate(BUNDLED).render(chat, tools=[{"name": "find"}], clear_thinking=True)
    assert '<tools>\n{"name": "find"}\n</tools><|user|>Hi' in told
    assert told.endswith(
        "<|assistant|><think>Look.</think><tool_call>find<arg_key>what</arg_key><arg_value>key</arg_value>"
        "<arg_key>count</arg_key><arg_value>2</arg_value></tool_call>"
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response><|assistant|><think>"
    )


def test_a_template_can_only_make_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
    with pytest.raises(RequestError, match="unsafe"):
        ChatTemplate(tmp_path).render(CHAT)
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(CheckpointError, match="is not a template"):
        ChatTemplate(tmp_path)
    with pytest.raises(CheckpointError, match="cannot be read"):
        ChatTemplate(tmp_path / "none")
