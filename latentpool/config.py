"""Every setting of latentpool, in one typed table: the fields of `Settings`.

A value comes from the flag, else the environment (LATENTPOOL_KV_PAGES for --kv-pages), else one TOML file (key kv-pages),
else the default. The file is --config, else LATENTPOOL_CONFIG, else ./latentpool.toml where there is one. A value that is not
allowed raises ConfigError naming itself, where it came from and what is allowed; so does a name that nobody knows.
"""

# ruff: noqa: RUF009 - _setting is dataclasses.field
from __future__ import annotations

import difflib
import os
import stat
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal, get_type_hints

from latentpool import kinds
from latentpool.errors import ConfigError
from latentpool.kinds import Kind

ENV_PREFIX = "LATENTPOOL_"
DEFAULT_FILE = Path("latentpool.toml")
ROUTER_PORT, MANAGER_PORT, WORKER_PORT = 7410, 7411, 7420
METRICS_PORTS = 10
"""From the router's port for metrics to rank 0's."""

ServiceName = Literal["router", "pool-manager", "rank-worker"]

Switch = Literal["auto", "on", "off"]


def _setting(default: Any, kind: Kind, help: str, *aliases: str) -> Any:
    return field(default=default, metadata={"kind": kind, "help": help, "aliases": aliases})


def _default_state_dir() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "latentpool"


# ---- the table -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Settings:
    """All settings, read and checked. None means what the help text calls the default."""

    # The model and the group
    model: Path | None = _setting(None, kinds.PATH, "The checkpoint's directory: config.json and *.safetensors.")
    ranks: int = _setting(2, kinds.whole(1, 8), "World size: how many rank workers make the group.", "world")
    rank: int | None = _setting(None, kinds.whole(0, 7), "This worker's rank, from 0.")
    dtype: Literal["f32", "bf16"] | None = _setting(
        None, kinds.choice("f32", "bf16"), "Compute dtype; by default the checkpoint's."
    )
    kv_cache: Literal["f32", "bf16", "fp8"] | None = _setting(
        None, kinds.choice("f32", "bf16", "fp8"), "Dtype of latent rows; by default the compute dtype. (fp8: only in plan.)"
    )
    drafts: bool = _setting(True, kinds.BOOL, "Count the draft layer (drafts are not run yet).")
    # The plan
    context: int | None = _setting(None, kinds.TOKENS, "Longest conversation; by default the model's.")
    parallel: int = _setting(1, kinds.whole(1, 4096), "Lanes: conversations that run at the same time.")
    kv_pages: Switch = _setting("auto", kinds.SWITCH, "Map pages on demand (on), or one window a lane (off).")
    split: Switch = _setting(
        "auto",
        kinds.SWITCH,
        "Keep a conversation's latent rows on its owner alone (on), or on every rank (off); auto: on from two ranks.",
    )
    borrow: bool = _setting(True, kinds.BOOL, "Lend free pages of other owners to prompts that are being computed.")
    cache: int = _setting(16 << 30, kinds.BYTES_OR_NONE, "Most bytes a rank gives to kept prompts; 0 keeps none.")
    keep_from: int = _setting(4096, kinds.TOKENS, "Shortest prompt that is kept, in tokens.")
    carry_from: int = _setting(
        2048,
        kinds.TOKENS,
        "Shortest kept prompt that moves to another rank where its own has no room; shorter ones are computed again.",
    )
    keep_replies: bool = _setting(True, kinds.BOOL, "Keep replies too: idle ranks compute them as the next turn's prompt.")
    plan_order: Literal["new", "stated"] = _setting(
        "new", kinds.choice("new", "stated"), "Order in which room is given out; stated is the older one, to compare."
    )
    page_rows: int = _setting(
        512,
        kinds.PAGE_ROWS,
        "Rows of a page: 64, 128, 256 or 512; small models set less.",
    )
    room: int | None = _setting(
        None, kinds.BYTES, "What a rank has left after weights, work buffers, links and the first lane."
    )
    fixed: int | None = _setting(None, kinds.BYTES, "What a lane needs at any length; by default computed from the model.")
    memory: int | None = _setting(
        None, kinds.BYTES, "Memory of a rank; by default half of what is available, shared by this host's ranks."
    )
    headroom: int = _setting(2048, kinds.TOKENS, "Reply tokens that admission reserves pages for at most.")
    # Addresses
    address: str = _setting(f"127.0.0.1:{ROUTER_PORT}", kinds.ADDRESS, "The router to talk to.")
    manager: str = _setting(f"127.0.0.1:{MANAGER_PORT}", kinds.ADDRESS, "The pool manager to talk to.")
    router_bind: str = _setting(f"127.0.0.1:{ROUTER_PORT}", kinds.ADDRESS, "Where the router listens.")
    manager_bind: str = _setting(f"127.0.0.1:{MANAGER_PORT}", kinds.ADDRESS, "Where the pool manager listens.")
    worker_bind: str = _setting(
        f"127.0.0.1:{WORKER_PORT}", kinds.ADDRESS, "Where rank 0 listens; rank r takes the port + r (port 0: any free one)."
    )
    advertise: str | None = _setting(
        None, kinds.ADDRESS, "Address of this worker as the router dials it; by default where it listens."
    )
    metrics_bind: str | None = _setting(
        None,
        kinds.ADDRESS,
        "Where Prometheus reads: the router at this port, the pool manager at port + 1, rank r at port + 10 + r "
        "(port 0: any free one); by default nowhere.",
    )
    secret_file: Path | None = _setting(
        None, kinds.PATH, "File with the group's secret, the same on every node; needed beyond loopback."
    )
    # The services
    transport: Literal["ucx", "inproc"] = _setting("ucx", kinds.choice("ucx", "inproc"), "Data plane between engines.")
    net_devices: str = _setting("lo", kinds.TEXT, "Network device of the data plane.")
    chunk_rows: int = _setting(
        2048,
        kinds.multiple_of_64(1 << 16),
        "Most prompt rows that a round computes, a multiple of 64.",
    )
    staging_rows: int = _setting(
        32768,
        kinds.multiple_of_64(1 << 20),
        "Rows of history that a rank holds at a time while it computes a prompt of another owner, a multiple of 64.",
    )
    audit: bool = _setting(
        False, kinds.BOOL, "Compare hashes of the borrowed and fetched rows with the owner's in every prompt chunk."
    )
    max_waiting: int = _setting(256, kinds.whole(1), "Conversations that may wait for a lane.")
    take_over: bool = _setting(False, kinds.BOOL, "End the session of the router that serves this group, and take its place.")
    state_dir: Path | None = _setting(
        None, kinds.PATH, "Where the pool manager keeps its term; by default ~/.local/state/latentpool."
    )
    join_timeout: float = _setting(300.0, kinds.real(1), "Seconds in which all workers must have joined.")
    dead_after: float = _setting(30.0, kinds.real(1), "Seconds of silence after which a rank counts as dead.")
    log_level: Literal["debug", "info", "warning", "error"] = _setting(
        "info", kinds.choice("debug", "info", "warning", "error"), "Least level of log lines."
    )
    log_dir: Path | None = _setting(None, kinds.PATH, "Write each service's log to a file here instead of stderr.")
    # Sampling
    temperature: float = _setting(0.0, kinds.real(0, 100), "0 is greedy: the likeliest token.")
    top_k: int = _setting(0, kinds.whole(0, 1024), "Draw from the k likeliest tokens; 0 draws from all.")
    top_p: float = _setting(
        1.0, kinds.SHARE, "Draw from the likeliest tokens that hold this share of the probability; 1: from all."
    )
    min_p: float = _setting(0.0, kinds.real(0, 1), "Draw from tokens at least this many times as likely as the likeliest.")
    seed: int | None = _setting(None, kinds.whole(0, 2**64 - 1), "Same seed, same reply; by default one is drawn and reported.")
    max_tokens: int | None = _setting(
        None, kinds.TOKENS, "Most tokens of the reply; by default until the limit of the context."
    )
    stop_token_ids: tuple[int, ...] = _setting((), kinds.IDS, "Token ids that end the reply.")
    ignore_eos: bool = _setting(False, kinds.BOOL, "Do not stop at the model's own end tokens.")
    # Checking
    expected: Path | None = _setting(None, kinds.PATH, "Reference data: a .safetensors file with input_ids, logits, ...")
    tolerance: float = _setting(2e-4, kinds.real(0), "Largest error that passes, relative to the largest logit.")

    @property
    def secret(self) -> bytes:
        """The group's secret: the contents of `secret_file` without surrounding white space; b"" without one. Raises
        ConfigError for a file that is missing, empty, or readable by everyone on this host."""
        return b"" if self.secret_file is None else _read_secret(self.secret_file)

    @property
    def state_directory(self) -> Path:
        return self.state_dir or _default_state_dir()

    def worker_address(self, rank: int) -> str:
        """Where `rank` listens."""
        return _moved(self.worker_bind, rank)

    def metrics_address(self, service: ServiceName) -> str | None:
        """Where this service is read by Prometheus; None: nowhere."""
        if self.metrics_bind is None:
            return None
        if service == "rank-worker":
            assert self.rank is not None
            return _moved(self.metrics_bind, METRICS_PORTS + self.rank)
        return _moved(self.metrics_bind, 1 if service == "pool-manager" else 0)


def _moved(address: str, ports: int) -> str:
    """host:port that many ports on; port 0, any free one, stays."""
    host, _, port = address.rpartition(":")
    return f"{host}:{int(port) + ports if int(port) else 0}"


TABLE: dict[str, Field[Any]] = {setting.name: setting for setting in fields(Settings)}


def kind_of(name: str) -> Kind:
    kind = TABLE[name].metadata["kind"]
    assert isinstance(kind, Kind)
    return kind


def is_switch(name: str) -> bool:
    """Whether the setting is given as --x / --no-x."""
    return get_type_hints(Settings)[name] is bool


def flag(name: str) -> str:
    return "--" + key(name)


def key(name: str) -> str:
    """The setting's key in the TOML file."""
    return name.replace("_", "-")


def variable(name: str) -> str:
    """The setting's environment variable."""
    return ENV_PREFIX + name.upper()


# ---- reading -------------------------------------------------------------------------------------------------------


def load(
    flags: Mapping[str, str | bool | None],
    environment: Mapping[str, str] | None = None,
    file: Path | None = None,
    defaults: Mapping[str, object] | None = None,
) -> Settings:
    """Reads all settings. `flags`: values given on the command line by setting name, None where not given; `file`: --config;
    `defaults`: a command's own defaults. Raises ConfigError."""
    environment = os.environ if environment is None else environment
    values: dict[str, Any] = dict(defaults or {})
    values |= _from_file(_config_file(environment, file))
    values |= _from_environment(environment)
    for name, value in flags.items():
        if value is not None:
            given = f"{flag(name)} {value}" if isinstance(value, str) else flag(name)
            values[name] = parse(name, value, given)
    return Settings(**values)


def parse(name: str, value: object, given: str) -> Any:
    """The setting's value in its type; `given` is how it was written, for the ConfigError."""
    kind = kind_of(name)
    try:
        return kind.parse(value)
    except (ValueError, KeyError):
        raise ConfigError(f"{given}: {key(name)} must be {kind.allowed}") from None


def _config_file(environment: Mapping[str, str], file: Path | None) -> Path | None:
    stated = file or (Path(value) if (value := environment.get(ENV_PREFIX + "CONFIG")) else None)
    if stated is not None:
        if not stated.exists():
            source = "--config" if file else "LATENTPOOL_CONFIG"
            raise ConfigError(f"{source} {stated}: no such file")
        return stated
    return DEFAULT_FILE if DEFAULT_FILE.is_file() else None


def _from_file(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read as TOML: {error}") from None
    names = {key(name): name for name in TABLE}
    values = {}
    for entry, value in table.items():
        if entry not in names:
            raise ConfigError(f"{path}: no setting is called {entry}{_nearest(entry, names)}")
        values[names[entry]] = parse(names[entry], value, f"{path}: {entry} = {_toml(value)}")
    return values


def _toml(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


def _from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    names = {variable(name): name for name in TABLE}
    values = {}
    for entry, value in environment.items():
        if not entry.startswith(ENV_PREFIX) or entry == ENV_PREFIX + "CONFIG":
            continue
        if entry not in names:
            raise ConfigError(f"environment variable {entry}: no setting is called that{_nearest(entry, names)}")
        values[names[entry]] = parse(names[entry], value, f"{entry}={value}")
    return values


def _nearest(name: str, known: Mapping[str, str]) -> str:
    """ "; do you mean kv-pages?", or nothing where no known name is near."""
    found = difflib.get_close_matches(name.replace("_", "-") if name.islower() else name, known, n=1, cutoff=0.6)
    return f"; do you mean {found[0]}?" if found else ""


def _read_secret(path: Path) -> bytes:
    try:
        mode = path.stat().st_mode
        secret = path.read_bytes().strip()
    except OSError as error:
        raise ConfigError(f"--secret-file {path}: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise ConfigError(f"--secret-file {path}: everyone on this host can read it; run chmod 600 {path}")
    if not secret:
        raise ConfigError(f"--secret-file {path}: is empty; write a secret to it, such as openssl rand -hex 32 gives")
    return secret


def as_flags(settings: Settings, names: Iterable[str]) -> list[str]:
    """The flags that give another latentpool command the same values; settings that are None are left out."""
    flags: list[str] = []
    for name in names:
        value = getattr(settings, name)
        if isinstance(value, bool):
            flags.append(flag(name) if value else f"--no-{key(name)}")
        elif isinstance(value, tuple):
            flags += [flag(name), " ".join(map(str, value))] if value else []
        elif value is not None:
            flags += [flag(name), str(value)]
    return flags
