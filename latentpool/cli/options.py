"""Commands draw their options from the table of settings, so that flag, default, variable and help come from one place."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from latentpool import config
from latentpool.errors import ConfigError, LatentPoolError

FAILED, USAGE, INTERRUPTED = 1, 2, 130

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a picture for people.")]


def takes(
    *names: str, needs: tuple[str, ...] = (), defaults: Mapping[str, object] | None = None
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a command of a function `(settings, ...)`: the named settings become options beside the function's own, and
    errors become one line on stderr and an exit code. `needs`: settings that must not be None; `defaults`: the command's."""
    defaults = defaults or {}

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(config_file: Path | None = None, **arguments: Any) -> None:
            flags = {name: arguments.pop(name) for name in names}
            try:
                settings = config.load(flags, file=config_file, defaults=defaults)
                for name in needs:
                    if getattr(settings, name) is None:
                        where = f"{config.variable(name)}, or {config.key(name)} in the TOML file"
                        raise ConfigError(f"{config.flag(name)} is missing (or {where})")
                function(settings, **arguments)
            except ConfigError as error:
                fail(error, USAGE)
            except LatentPoolError as error:
                fail(error)
            except KeyboardInterrupt:
                raise typer.Exit(INTERRUPTED) from None
            except BrokenPipeError:
                sys.stderr.close()
                raise typer.Exit(FAILED) from None

        own = [p for p in inspect.signature(function, eval_str=True).parameters.values() if p.name != "settings"]
        options = [_option(name, defaults.get(name, config.TABLE[name].default)) for name in names]
        parameters = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in (*own, *options, _CONFIG_FILE)]
        command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        command.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
        return command

    return decorate


def fail(error: Exception | str, code: int = FAILED) -> NoReturn:
    """One message on stderr, no traceback, and the exit code."""
    typer.echo(f"latentpool: {error}", err=True)
    raise typer.Exit(code)


_CONFIG_FILE = inspect.Parameter(
    "config_file",
    inspect.Parameter.KEYWORD_ONLY,
    default=None,
    annotation=Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="PATH", help="TOML file with settings (./latentpool.toml if there is one; LATENTPOOL_CONFIG)."
        ),
    ],
)


def _option(name: str, default: object) -> inspect.Parameter:
    """A typer option that passes its text on unread: `config.load` reads it, as it reads variables and the file."""
    entry = config.TABLE[name]
    flags = [config.flag(name), *(f"--{alias}" for alias in entry.metadata["aliases"])]
    if config.is_switch(name):
        flags = [f"{config.flag(name)}/--no-{config.key(name)}"]
    shown = "" if default in (None, ()) else f"{_shown(default)}; "
    option = typer.Option(
        *flags,
        metavar=config.kind_of(name).metavar or None,
        help=f"{entry.metadata['help']} ({shown}{config.variable(name)})",
        show_default=False,
    )
    annotation: Any = Annotated[(bool if config.is_switch(name) else str) | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _shown(default: object) -> str:
    if isinstance(default, bool):
        return "yes" if default else "no"
    if isinstance(default, int) and default >= 1 << 30:
        return f"{default >> 30}GiB"
    return f"{default:g}" if isinstance(default, float) else str(default)
