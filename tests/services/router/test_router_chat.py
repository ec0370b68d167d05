"""Chats: the checkpoint's template, what it is given, where the newest message begins, and what is refused in which words."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from random_checkpoint import random_checkpoint
from router_fake_model import reply
from router_fakes import Rig
from test_router_requests import byte_tokenizer
from tokenizers import Tokenizer

from latentpool.errors import CheckpointError, RequestError
from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2
from services.router.chat import ChatTemplate
from services.router.kept import Blocks
from services.router.requests import Limits, read_generate
from services.router.text import Texts

pytestmark = pytest.mark.timeout(30)

PLAIN = (
    "{% for message in messages %}\n"
    "    {%- if message.role not in ('system', 'user', 'assistant', 'tool') %}\n"
    "    {{- raise_exception('who is ' + message.role + '?') }}\n"
    "    {%- endif %}\n"
    "<{{ message.role }}>{{ message.content }}\n"
    "{% endfor %}\n"
    "{% if tools %}{{ tools | tojson }}{% endif %}\n"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
"""Blocks leave no line of their own, as `transformers` sets it."""


def chat(*messages: tuple[str, str], tools: str = "") -> router_pb2.Chat:
    return router_pb2.Chat(messages=[router_pb2.ChatMessage(role=role, content=text) for role, text in messages], tools=tools)


def model(directory: Path, template: str | None = PLAIN, config: Any = None) -> Path:
    directory.mkdir(exist_ok=True)
    if template is not None:
        (directory / "chat_template.jinja").write_text(template)
    if config is not None:
        (directory / "tokenizer_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    return directory


# ---- templates ------------------------------------------------------------------------------------------------------


def test_a_template_is_rendered_as_transformers_would(tmp_path: Path) -> None:
    template = ChatTemplate(model(tmp_path))
    rendered = template.render(chat(("system", "be kind"), ("user", "<b>hi</b>"), tools='[{"name": "föö", "b": "<"}]'))
    assert rendered.text == '<system>be kind\n<user><b>hi</b>\n[{"name": "föö", "b": "<"}]<assistant>'
    assert rendered.before == '<system>be kind\n[{"name": "föö", "b": "<"}]'


def test_the_newest_message_of_the_user_counts(tmp_path: Path) -> None:
    template = ChatTemplate(model(tmp_path))
    told = [("user", "a"), ("assistant", "b"), ("user", "c"), ("tool", "d")]
    assert template.render(chat(*told)).before == "<user>a\n<assistant>b\n"
    assert template.render(chat(("system", "a"))).before == ""


def test_a_template_that_takes_no_chat_without_a_user_has_no_place_to_go_back_to(tmp_path: Path) -> None:
    source = "{% if not messages %}{{ raise_exception('nobody speaks') }}{% endif %}{{ messages[0].content }}"
    template = ChatTemplate(model(tmp_path, source))
    assert (template.render(chat(("user", "a"))).text, template.render(chat(("user", "a"))).before) == ("a", "")


def test_templates_stand_in_the_tokenizers_config_too(tmp_path: Path) -> None:
    config = {
        "bos_token": {"content": "<s>"},
        "eos_token": "</s>",
        "chat_template": [
            {"name": "default", "template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"},
            {"name": "tool_use", "template": "{{ tools | length }} tools"},
        ],
    }
    template = ChatTemplate(model(tmp_path, None, config))
    assert template.render(chat(("user", "hi"))).text == "<s>hi</s>"
    assert template.render(chat(("user", "hi"), tools="[1, 2]")).text == "2 tools"
    assert ChatTemplate(model(tmp_path, None, {"chat_template": "x"})).render(chat(("user", "hi"))).text == "x"
    assert ChatTemplate(model(tmp_path, "y")).render(chat(("user", "hi"))).text == "y"  # its own file comes first


@pytest.mark.parametrize(
    ("template", "config", "words"),
    [
        ("{% if %}", None, "chat_template.jinja: is no chat template: Expected an expression"),
        (None, {"chat_template": "{{"}, "tokenizer_config.json: is no chat template: unexpected 'end of template'"),
        (None, {"chat_template": 3}, "chat_template is neither a template nor a list of named ones"),
        (None, "{", "tokenizer_config.json: cannot be read"),
        (None, [], "tokenizer_config.json: is no JSON object"),
    ],
)
def test_a_checkpoint_with_a_broken_template_is_not_served(tmp_path: Path, template: Any, config: Any, words: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        ChatTemplate(model(tmp_path, template, config))
    assert words in str(caught.value)


def test_a_template_runs_in_a_sandbox(tmp_path: Path) -> None:
    source = "{{ messages.__class__.__mro__[1].__subclasses__() }}"
    with pytest.raises(RequestError, match="access to attribute '__class__' of 'list' object is unsafe"):
        ChatTemplate(model(tmp_path, source)).render(chat(("user", "a")))
    with pytest.raises(RequestError, match=r"says: .*append.*unsafe|says: .*not safely callable"):
        ChatTemplate(model(tmp_path, "{{ messages.append(1) }}")).render(chat(("user", "a")))


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "field", "words"),
    [
        (chat(), "chat.messages", "chat.messages: send at least one message"),
        (chat(("user", "a"), ("", "b")), "chat.messages[1].role", "chat.messages[1].role is empty: system, user"),
        (chat(("user", "a"), ("judge", "b")), "chat", "the checkpoint's chat template says: who is judge?"),
        (chat(("user", "a"), tools="{"), "chat.tools", "chat.tools is not JSON: Expecting property name"),
        (chat(("user", "a"), tools='{"a": 1}'), "chat.tools", "chat.tools is a JSON dict: send a list of tools"),
        (chat(("user", "a"), tools="[" * 100_000), "chat.tools", "chat.tools is not JSON: "),
    ],
)
def test_what_a_template_does_not_take_is_refused_by_name(tmp_path: Path, asked: Any, field: str, words: str) -> None:
    with pytest.raises(RequestError) as caught:
        ChatTemplate(model(tmp_path)).render(asked)
    assert words in str(caught.value)
    assert caught.value.field == field


def test_a_role_that_the_template_passes_over_is_not_passed_over_in_silence(tmp_path: Path) -> None:
    known = "{% for m in messages if m.role in ('user', 'tool') %}{{ m.content }}{% endfor %}"
    template = ChatTemplate(model(tmp_path, known))
    assert "tool output" in template.render(chat(("user", "a"), ("tool", "tool output"))).text
    with pytest.raises(RequestError, match=r"chat.messages\[1\].role = 'developer': the checkpoint's chat template knows no"):
        template.render(chat(("user", "a"), ("developer", "b"), ("developer", "c")))


def test_an_error_of_the_template_itself_is_told(tmp_path: Path) -> None:
    template = ChatTemplate(model(tmp_path, "{{ 1 // messages[0].content | length }}"))
    with pytest.raises(RequestError, match="fails at these messages: ZeroDivisionError"):
        template.render(chat(("user", "")))
    with pytest.raises(RequestError, match="chat: this checkpoint has no chat template"):
        ChatTemplate(model(tmp_path / "none", None)).render(chat(("user", "a")))


async def test_a_chat_needs_a_tokenizer(tmp_path: Path) -> None:
    texts = Texts(model(tmp_path))
    with pytest.raises(RequestError, match="chat: this checkpoint is served without a tokenizer"):
        await texts.encode_chat(chat(("user", "a")))
    texts.close()


# ---- prompts --------------------------------------------------------------------------------------------------------


LIMITS = Limits(100_000, SimpleNamespace(vocab=1 << 20, image_ids=(), eos_ids=()), Blocks.seeded("these numerics"))


async def read(texts: Texts, **fields: Any) -> Any:
    return await read_generate(router_pb2.GenerateRequest(**fields), LIMITS, texts)


async def test_a_chats_tokens_are_those_of_its_text_and_go_back_to_where_the_newest_message_begins() -> None:
    texts = Texts(random_checkpoint())
    tokenizer = Tokenizer.from_file(str(random_checkpoint() / "tokenizer.json"))
    turns = [("system", "You are brief."), ("user", "Hello?"), ("assistant", "Yes."), ("user", "How many? 1234567")]
    accepted = await read(texts, chat=chat(*turns))
    text = ChatTemplate(random_checkpoint()).render(chat(*turns)).text
    assert tokenizer.decode(accepted.tokens.tolist(), skip_special_tokens=False) == text
    edited = await read(texts, chat=chat(*turns[:3], ("user", "Why so few?")))
    rewind = accepted.keeping.rewind
    assert rewind == edited.keeping.rewind
    assert accepted.tokens[:rewind].tolist() == edited.tokens[:rewind].tolist()
    before, after = (tokenizer.decode(part.tolist(), skip_special_tokens=False) for part in np.split(accepted.tokens, [rewind]))
    assert before.endswith("Yes.")
    assert after.startswith("<|user|>")
    assert "How many?" in after
    texts.close()


async def test_a_tokenizer_that_adds_tokens_adds_none_to_a_chat(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    tokenizer = json.loads((tmp_path / "tokenizer.json").read_text())
    special = {"id": "<|eos|>", "ids": [250], "tokens": ["<|eos|>"]}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing", "pair": [], "special_tokens": {"<|eos|>": special},
        "single": [{"SpecialToken": {"id": "<|eos|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
    }  # fmt: skip
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = Texts(model(tmp_path, "{{ messages[-1].content }}"))
    text, (tokens, rewind) = await texts.encode("abc"), await texts.encode_chat(chat(("user", "abc")))
    assert (len(text), text[1:], rewind) == (4, tokens, 0)
    texts.close()


async def test_a_caller_may_know_itself_where_the_newest_message_begins() -> None:
    texts = Texts(None)
    ids = router_pb2.TokenIds(ids=range(300))
    assert (await read(texts, token_ids=ids, rewind=200)).keeping.rewind == 200
    assert (await read(texts, token_ids=ids)).keeping.rewind == 0
    with pytest.raises(RequestError, match="rewind = 301: at most 300, the tokens of the prompt") as caught:
        await read(texts, token_ids=ids, rewind=301)
    assert caught.value.field == "rewind"
    texts.close()


async def test_a_chat_is_answered_and_its_edited_message_resumes_before_it(tmp_path: Path) -> None:
    byte_tokenizer(tmp_path)
    letters = {i: letter for letter, i in Tokenizer.from_file(str(tmp_path / "tokenizer.json")).get_vocab().items()}
    assert len(letters) > 200
    async with Rig(2, model=model(tmp_path), keep_from=64, keep_replies=False) as rig:
        await rig.client.wait_ready(10)
        system = ("system", "0123456789" * 20)

        async def ask(text: str) -> router_pb2.Usage:
            sampling = Sampling(max_tokens=3, ignore_eos=True)
            events = [event async for event in rig.client.generate(chat=[system, ("user", text)], sampling=sampling)]
            prompt = await rig.client.tokenize(f"<system>{system[1]}\n<user>{text}\n<assistant>")
            said = [t for event in events if isinstance(event, router_pb2.Chunk) for t in event.token_ids]
            assert said == reply(prompt, 3)
            return events[-1].usage

        assert (await ask("what is your name? " * 20)).cached_tokens == 0
        assert (await ask("who are you? " * 20)).cached_tokens == 192  # 209 before the message
