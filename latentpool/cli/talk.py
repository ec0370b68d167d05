"""`latentpool generate` and `score`: one request to a running group, its reply on stdout, everything else on stderr."""

from __future__ import annotations

import math
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from latentpool.cli.calls import as_dict, as_json, ask_router
from latentpool.cli.options import Json, takes
from latentpool.cli.tables import MARKS
from latentpool.client import Client, GenerateEvent, Message
from latentpool.config import Settings
from latentpool.errors import ConfigError
from latentpool.sampling import MAX_LOG_PROBS, Sampling
from latentpool.v1 import router_pb2 as pb

SAMPLING = ("max_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_token_ids", "ignore_eos")

Prompt = str | list[int]
PromptText = Annotated[str | None, typer.Argument(metavar="[PROMPT]", help="The prompt's text.", show_default=False)]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompt-file", metavar="PATH", help="Read the text from a file; - is stdin.", show_default=False),
]
TokenIds = Annotated[
    str | None, typer.Option("--token-ids", metavar="IDS", help='The prompt as ids: "1 2 3".', show_default=False)
]
Stops = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="End the reply where this text appears; may be repeated.", show_default=False),
]
LogProbs = Annotated[
    int | None,
    typer.Option(
        "--log-probs",
        min=0,
        max=MAX_LOG_PROBS,
        metavar="N",
        help="With --json: log-probabilities, and the N likeliest.",
    ),
]
Background = Annotated[bool, typer.Option("--background", help="Let all requests that are not in the background go first.")]


@takes("address", *SAMPLING)
def generate(
    settings: Settings,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    token_ids: TokenIds = None,
    stop: Stops = None,
    log_probs: LogProbs = None,
    background: Background = False,
    json: Json = False,
) -> None:
    """Continues a prompt and streams the reply to stdout; usage and receipt follow on stderr. Ctrl-C cancels it.

    \b
    latentpool generate "Once upon a time" --max-tokens 100 --stop "The end"
    latentpool generate --prompt-file book.txt --temperature 0.7 --top-p 0.9
    latentpool generate --token-ids "1 2 3" --max-tokens 8 --log-probs 5 --json

    "Cached" tokens were resumed from a kept prompt instead of computed; its mark says why it was kept (latentpool kept --help).
    """
    if log_probs is not None and not json:
        raise ConfigError("--log-probs: they are shown as JSON only: add --json")
    asked = read_prompt(prompt, prompt_file, token_ids)
    how = replace(sampling(settings), stop=tuple(stop or ()), log_probs=log_probs)
    write = None if json else sys.stdout.write
    reply = ask_router(settings, lambda client: stream_reply(client, asked, how, write, background))
    if json:
        print(as_json(reply))


async def stream_reply(
    client: Client,
    prompt: Prompt | None,
    how: Sampling,
    write: Any,
    background: bool = False,
    chat: Sequence[Message] | None = None,
) -> dict[str, Any]:
    """Streams one reply, to a prompt or to a chat, through `write` as text (ids where the model has no tokenizer), and tells
    on stderr how it went. write None: quietly. Returns the whole reply."""
    console = Console(stderr=True, highlight=False)
    as_text = (await client.get_model()).has_tokenizer
    ids: list[int] = []
    text = ""
    log_probs: list[dict[str, Any]] = []
    completion = pb.Completion()
    async for event in with_progress(client.generate(prompt, how, chat=chat, background=background), console):
        if isinstance(event, pb.Chunk):
            ids += event.token_ids
            text += event.text
            log_probs += map(as_dict, event.log_probs)
            if write is not None:
                write(event.text if as_text else "".join(f"{token} " for token in event.token_ids))
                sys.stdout.flush()
        elif isinstance(event, pb.Completion):
            completion = event
    if write is not None:
        write("\n")
        sys.stdout.flush()
        console.print(f"[dim]{escape(summary(completion))}[/]", soft_wrap=True)
    scored = {} if how.log_probs is None else {"log_probs": log_probs}
    return {"text": text, "token_ids": ids} | scored | as_dict(completion)


async def with_progress(events: AsyncIterator[GenerateEvent], console: Console) -> AsyncIterator[GenerateEvent]:
    """Passes events on; on a terminal it shows waiting and filling until the first token."""
    with console.status("waiting for the router") as status:
        async for event in events:
            if isinstance(event, pb.Waiting):
                status.update(
                    f"waiting, {event.ahead} ahead: {event.reason}" if event.reason else f"waiting, {event.ahead} ahead"
                )
            elif isinstance(event, pb.Filling):
                status.update(f"reading the prompt: {event.tokens_done:,} of {event.tokens_total:,} tokens")
            else:
                status.stop()
            yield event


def summary(completion: pb.Completion) -> str:
    """Usage, timings, moves, seed and receipt, in two lines."""
    receipt = completion.receipt
    return (
        f"{usage_line(completion)}; seed {completion.seed}\nreceipt {receipt.sha256} (numerics {receipt.numerics_digest[:16]})"
    )


def usage_line(completion: pb.Completion) -> str:
    """Usage, timings and moves, in a line."""
    usage, timings = completion.usage, completion.timings
    why = pb.FinishReason.Name(completion.finish_reason).removeprefix("FINISH_REASON_").lower()
    if completion.stop:
        why += f" {completion.stop!r}"
    decoding = timings.total_seconds - timings.first_token_seconds
    rate = f", {(usage.generated_tokens - 1) / decoding:.1f} tokens/s" if usage.generated_tokens > 1 and decoding > 0 else ""
    mark = MARKS.get(usage.cached_from)
    source = f" from a {mark} mark" if mark else ""
    computed = {"on borrowed pages": usage.borrowed_tokens, "on fetched rows": usage.fetched_tokens}
    ways = "".join(f", {count:,} {how}" for how, count in computed.items() if count)
    moves = "".join(f"; {what} {_times(n)}" for what, n in (("carried", usage.carried), ("parked", usage.parked)) if n)
    return (
        f"{usage.prompt_tokens:,} prompt tokens ({usage.cached_tokens:,} cached{source}{ways}), {usage.generated_tokens:,} "
        f"generated (ended by {why}); first token after {timings.first_token_seconds:.2f} s{rate}{moves}"
    )


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def sampling(settings: Settings) -> Sampling:
    return Sampling(
        temperature=settings.temperature,
        top_k=settings.top_k,
        seed=settings.seed,
        max_tokens=settings.max_tokens,
        stop_token_ids=settings.stop_token_ids,
        ignore_eos=settings.ignore_eos,
        top_p=settings.top_p,
        min_p=settings.min_p,
    )


def read_prompt(text: str | None, file: Path | None, ids: str | None) -> Prompt:
    """The one prompt that was given. Raises ConfigError for none, several, or a file that is not UTF-8 text."""
    if sum(value is not None for value in (text, file, ids)) != 1:
        raise ConfigError('give one prompt: its text, --prompt-file PATH (- is stdin), or --token-ids "1 2 3"')
    if ids is not None:
        try:
            return [int(item) for item in ids.replace(",", " ").split()]
        except ValueError:
            raise ConfigError(f"--token-ids {ids}: must be token ids such as 1 2 3") from None
    if file is None:
        assert text is not None
        return text
    try:
        return (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode()
    except OSError as error:
        raise ConfigError(f"--prompt-file {file}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--prompt-file {file}: is not UTF-8 text (byte {error.start} is {error.object[error.start]:#04x})"
        ) from None


@takes("address")
def score(
    settings: Settings,
    prompt: PromptText = None,
    prompt_file: PromptFile = None,
    token_ids: TokenIds = None,
    decode_from: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Compute tokens from this one on as if they were generated.")
    ] = None,
    json: Json = False,
) -> None:
    """What the model thinks of each token: its natural log-probability after the tokens before it.

    \b
    latentpool score "Once upon a time"
    latentpool score --token-ids "1 2 3 4" --decode-from 2 --json
    """
    asked = read_prompt(prompt, prompt_file, token_ids)
    rows = ask_router(settings, lambda client: _scores(client, asked, decode_from))
    # The last row speaks of a token that is not there.
    given = [row for row in rows if not math.isnan(row["log_prob"])]
    total = sum(row["log_prob"] for row in given)
    if json:
        print(as_json({"rows": [row | {"log_prob": _or_none(row["log_prob"])} for row in rows], "total_log_prob": total}))
        return
    for row in rows:
        shown = "" if math.isnan(row["log_prob"]) else f"{row['log_prob']:.6f}"
        print(f"{row['position']:>8} {shown:>12}   best {row['best_id']}")
    if given:
        print(f"{len(given):,} tokens: {total:.4f} in all, perplexity {math.exp(-total / len(given)):.4f}", file=sys.stderr)


async def _scores(client: Client, prompt: Prompt, decode_from: int | None) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    async for event in client.score(prompt, decode_from=decode_from):
        if isinstance(event, pb.ScoredRows):
            for index, (log_prob, best) in enumerate(zip(event.next_log_probs, event.best_ids, strict=True)):
                rows.append({"position": event.first_position + index, "log_prob": log_prob, "best_id": best})
    return rows


def _or_none(number: float) -> float | None:
    return None if math.isnan(number) else number
