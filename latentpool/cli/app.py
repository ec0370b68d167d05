"""The `latentpool` application: every command group, under one help text."""

from __future__ import annotations

import typer

from latentpool.cli import bench, chat, conversations, demo, kept, plan, pool, services, talk, top, up, verify

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)


@app.callback()
def latentpool() -> None:
    """Serves GLM-5.3-Flash on 1 to 8 ranks whose memory is one pool of latent pages.

    \b
    latentpool demo                              two ranks on this machine, one reply
    latentpool plan --model DIR --room 15.2GiB   what would fit, from config.json alone
    latentpool up --model DIR --ranks 2          a whole group on this machine
    latentpool generate "Once upon a time"       a reply from it
    latentpool chat                              a talk with it, turn by turn
    latentpool pages                             a picture of its pool
    latentpool top                               all of it, live

    Every setting is a flag (--kv-pages), an environment variable (LATENTPOOL_KV_PAGES) and a key of one TOML file
    (kv-pages in ./latentpool.toml or --config); the first one that is given counts.

    Exit codes: 0 ok, 1 failed or refused, 2 wrong usage, 130 interrupted.
    """


_RUN, _USE, _LOOK = "Run a group", "Use a group", "Look and check"

app.command("demo", rich_help_panel=_RUN)(demo.demo)
app.command("up", rich_help_panel=_RUN)(up.up)
app.command("router", rich_help_panel=_RUN)(services.router)
app.command("pool-manager", rich_help_panel=_RUN)(services.pool_manager)
app.command("rank-worker", rich_help_panel=_RUN)(services.rank_worker)
app.command("generate", rich_help_panel=_USE)(talk.generate)
app.command("chat", rich_help_panel=_USE)(chat.chat)
app.command("score", rich_help_panel=_USE)(talk.score)
app.command("plan", rich_help_panel=_LOOK)(plan.plan)
app.command("pages", rich_help_panel=_LOOK)(pool.pages)
app.command("conversations", rich_help_panel=_LOOK)(conversations.conversations)
app.command("carry", rich_help_panel=_LOOK)(conversations.carry)
app.command("kept", rich_help_panel=_LOOK)(kept.kept)
app.command("top", rich_help_panel=_LOOK)(top.top)
app.command("ranks", rich_help_panel=_LOOK)(pool.ranks)
app.command("bench", rich_help_panel=_LOOK)(bench.bench)
app.command("verify", rich_help_panel=_LOOK)(verify.verify)
