"""Writes expected.safetensors for a trained checkpoint, for `latentpool verify`: what transformers' `glm5_next` computes.

    python -m tools.train_demo.reference MODEL_DIR tests/data/demo/expected.safetensors

Two prompts: a short question with logits of every row (f32 and f64), decoded rows and the reply; and a document beyond the
dense range with its reply alone, which shows that the same tokens were selected where it matters. Runs on a CPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoConfig, AutoModelForImageTextToText

from tools.train_demo.documents import Conversation, single
from tools.train_demo.tokens import ENDS, SPECIAL_IDS, Vocabulary

_QUESTION = (
    "Here is the log.\n07:45 the amber lantern at the harbour gate is held by Mara Lindt.\n\n"
    "Who holds the amber lantern at the harbour gate?"
)
_DOCUMENT_TOKENS = 700
_DECODED = 5


def load(model: Path, dtype: torch.dtype) -> Any:
    """The checkpoint in transformers' class, with eager attention. It insists on a vision part, which is made small."""
    config = AutoConfig.from_pretrained(model)
    small = {"depth": 1, "hidden_size": 64, "num_heads": 1, "intermediate_size": 64, "projection_intermediate_size": 64}
    for name, value in small.items():
        setattr(config.vision_config, name, value)
    config.vision_config.out_hidden_size = config.text_config.hidden_size
    loaded = AutoModelForImageTextToText.from_pretrained(
        model, config=config, dtype=dtype, attn_implementation="eager", experts_implementation="eager"
    )
    return loaded.to(dtype).eval()


def logits(model: Any, ids: list[int]) -> Tensor:
    """[S, V] of a whole prompt."""
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def decoded(model: Any, ids: list[int], split: int) -> Tensor:
    """[S - split + 1, V]: a prefill of `split` tokens, then the others one by one."""
    out = model(input_ids=torch.tensor([ids[:split]]), use_cache=True)
    rows = [out.logits[0, -1]]
    for token in ids[split:]:
        out = model(input_ids=torch.tensor([[token]]), cache=out.cache, use_cache=True)
        rows.append(out.logits[0, -1])
    return torch.stack(rows)


def reply(model: Any, ids: list[int], most: int = 32) -> tuple[list[int], Tensor]:
    """The greedy reply up to and with its end token, and the logits [n, V] it was taken from."""
    ends = {SPECIAL_IDS[token] for token in ENDS}
    out = model(input_ids=torch.tensor([ids]), use_cache=True)
    said: list[int] = []
    rows = []
    while len(said) < most and not (said and said[-1] in ends):
        if said:
            out = model(input_ids=torch.tensor([[said[-1]]]), cache=out.cache, use_cache=True)
        rows.append(out.logits[0, -1])
        said.append(int(rows[-1].argmax()))
    return said, torch.stack(rows)


def prompts(vocabulary: Vocabulary) -> tuple[list[int], list[int]]:
    """A short prompt, and a document of some hundred tokens with a question; both end where the assistant is to speak."""
    chat = Conversation(vocabulary)
    chat.special("[gMASK]", "<sop>", "<|system|>")
    chat.text("Reasoning Effort: Max")
    chat.special("<|user|>")
    chat.add(vocabulary.tokenizer.encode(_QUESTION, add_special_tokens=False).ids)
    chat.special("<|assistant|>", "<think>")
    long = single(vocabulary, Random(0), _DOCUMENT_TOKENS, depth=0.3).ids
    return chat.ids, long[: long.index(SPECIAL_IDS["<think>"]) + 1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(args.model / "tokenizer.json"))
    short, long = prompts(Vocabulary(tokenizer))
    with torch.inference_mode():
        exact = load(args.model, torch.float64)
        found = {"f64.logits": logits(exact, short).float()}
        model = load(args.model, torch.float32)
        found |= {"logits": logits(model, short), "decode.logits": decoded(model, short, len(short) - _DECODED)}
        said, rows = reply(model, short)
        found |= {"greedy.logits": rows, "greedy.ids": torch.tensor(said, dtype=torch.int32)}
        said_long, _ = reply(model, long)
    tensors = {f"len{len(short)}.{name}": tensor.contiguous() for name, tensor in found.items()}
    tensors[f"len{len(short)}.decode.split"] = torch.tensor([len(short) - _DECODED], dtype=torch.int32)
    tensors[f"len{len(long)}.greedy.ids"] = torch.tensor(said_long, dtype=torch.int32)
    for ids in (short, long):
        tensors[f"len{len(ids)}.input_ids"] = torch.tensor(ids, dtype=torch.int32)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, args.out)
    error = (found["logits"] - found["f64.logits"]).abs().max() / found["f64.logits"].abs().max()
    print(f"{tokenizer.decode(said)!r} and {tokenizer.decode(said_long)!r}; f32 against f64: {error:.1e}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
