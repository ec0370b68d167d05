"""The bundled checkpoint's chat template: the release's conventions, through the router's own rendering."""

from __future__ import annotations

from pathlib import Path

import latentpool
from latentpool.v1 import router_pb2
from services.router.chat import ChatTemplate

BUNDLED = Path(latentpool.__file__).parent / "checkpoints" / "demo"
START = "[gMASK]<sop><|system|>Reasoning Effort: Max"


def chat(*messages: tuple[str, str], tools: str = "") -> router_pb2.Chat:
    return router_pb2.Chat(messages=[router_pb2.ChatMessage(role=role, content=text) for role, text in messages], tools=tools)


def test_roles_follow_one_another_without_newlines() -> None:
    """A reply follows an empty thought, as the model was trained, so that the next prompt begins with prompt and reply."""
    first = ChatTemplate(BUNDLED).render(chat(("system", "Be kind."), ("user", "Hi")))
    assert first.text == f"{START}<|system|>Be kind.<|user|>Hi<|assistant|><think>"
    talk = chat(("system", "Be kind."), ("user", "Hi"), ("assistant", "Hello."), ("user", "Who are you?"))
    told = ChatTemplate(BUNDLED).render(talk)
    assert told.text == f"{first.text}</think>Hello.<|user|>Who are you?<|assistant|><think>"
    assert told.before == f"{first.text}</think>Hello."


def test_tools_and_their_results() -> None:
    talk = chat(("user", "Hi"), ("tool", "one"), ("tool", "two"), tools='[{"name": "find"}]')
    told = ChatTemplate(BUNDLED).render(talk).text
    assert '<tools>\n{"name": "find"}\n</tools><|user|>Hi' in told
    assert told.endswith(
        "<|observation|><tool_response>one</tool_response><tool_response>two</tool_response><|assistant|><think>"
    )
