import os
from pathlib import Path

import pytest

from latentpool import config
from latentpool.errors import ConfigError


@pytest.fixture(autouse=True)
def in_an_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def load(flags=None, environment=None, file=None, **defaults):
    return config.load(flags or {}, environment or {}, file, defaults)


def write(text, name="latentpool.toml"):
    Path(name).write_text(text)
    return Path(name)


def test_flag_before_variable_before_file_before_default():
    assert load().parallel == 1
    assert load(parallel=3).parallel == 3
    write("parallel = 5")
    assert load(parallel=3).parallel == 5
    assert load(environment={"LATENTPOOL_PARALLEL": "7"}).parallel == 7
    assert load({"parallel": "9"}, {"LATENTPOOL_PARALLEL": "7"}).parallel == 9
    assert load({"parallel": None}, {"LATENTPOOL_PARALLEL": "7"}).parallel == 7


def test_which_file():
    write("parallel = 2")
    other = write("parallel = 3", "other.toml")
    third = write("parallel = 4", "third.toml")
    assert load().parallel == 2
    assert load(environment={"LATENTPOOL_CONFIG": str(other)}).parallel == 3
    assert load(environment={"LATENTPOOL_CONFIG": str(other)}, file=third).parallel == 4
    with pytest.raises(ConfigError, match=r"^--config absent\.toml: no such file$"):
        load(file=Path("absent.toml"))
    with pytest.raises(ConfigError, match=r"^LATENTPOOL_CONFIG absent\.toml: no such file$"):
        load(environment={"LATENTPOOL_CONFIG": "absent.toml"})


def test_values_are_read_in_their_type():
    write('context = "1M"\ncache = 1024\ntake-over = true\nstop-token-ids = [1, 2]\ntemperature = 1\nkv-cache = "fp8"')
    settings = load()
    assert (settings.context, settings.cache, settings.take_over) == (1 << 20, 1024, True)
    assert settings.stop_token_ids == (1, 2)
    assert settings.temperature == 1.0
    assert settings.kv_cache == "fp8"
    assert load({"take_over": False}).take_over is False


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"kv_pages": "maybe"}, "--kv-pages maybe: kv-pages must be auto, on or off"),
        ({"ranks": "9"}, "--ranks 9: ranks must be a whole number from 1 to 8"),
        ({"ranks": "two"}, "--ranks two: ranks must be a whole number from 1 to 8"),
        ({"room": "15.2Gib/s"}, "--room 15.2Gib/s: room must be a size such as 15.2GiB, 180MiB or a number of bytes"),
        ({"context": "1G"}, "--context 1G: context must be a number of tokens such as 1M (1,048,576), 128k (131,072) or 4096"),
        ({"page_rows": "100"}, "--page-rows 100: page-rows must be 64, 128, 256 or 512"),
        ({"address": "7410"}, "--address 7410: address must be host:port, with a port from 0 to 65535"),
        ({"temperature": "nan"}, "--temperature nan: temperature must be a number from 0 to 100"),
        ({"top_k": "2000"}, "--top-k 2000: top-k must be a whole number from 0 to 1024"),
        ({"chunk_rows": "100"}, "--chunk-rows 100: chunk-rows must be a multiple of 64 from 64 to 65536"),
        (
            {"keep_from": "0"},
            "--keep-from 0: keep-from must be a number of tokens such as 1M (1,048,576), 128k (131,072) or 4096",
        ),
        ({"staging_rows": "96"}, "--staging-rows 96: staging-rows must be a multiple of 64 from 64 to 1048576"),
        ({"staging_rows": "0"}, "--staging-rows 0: staging-rows must be a multiple of 64 from 64 to 1048576"),
        ({"metrics_bind": ":9400"}, "--metrics-bind :9400: metrics-bind must be host:port, with a port from 0 to 65535"),
        ({"stop_token_ids": "1 x"}, "--stop-token-ids 1 x: stop-token-ids must be token ids such as 1 2 3"),
    ],
)
def test_a_bad_flag_names_itself_and_what_is_allowed(flags, message):
    with pytest.raises(ConfigError) as caught:
        load(flags)
    assert str(caught.value) == message


def test_a_bad_value_names_its_source():
    with pytest.raises(ConfigError) as caught:
        load(environment={"LATENTPOOL_SPLIT": "yes"})
    assert str(caught.value) == "LATENTPOOL_SPLIT=yes: split must be auto, on or off"
    write("ranks = true")
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value) == "latentpool.toml: ranks = true: ranks must be a whole number from 1 to 8"


def test_unknown_names_are_errors_that_suggest_the_nearest():
    with pytest.raises(ConfigError) as caught:
        load(environment={"LATENTPOOL_KV_PAGE": "on"})
    assert (
        str(caught.value)
        == "environment variable LATENTPOOL_KV_PAGE: no setting is called that; do you mean LATENTPOOL_KV_PAGES?"
    )
    write("kv_pages = 'on'")
    with pytest.raises(ConfigError) as caught:
        load()
    assert str(caught.value) == "latentpool.toml: no setting is called kv_pages; do you mean kv-pages?"
    write("zzz = 1")
    with pytest.raises(ConfigError, match=r"no setting is called zzz$"):
        load()


def test_a_file_that_is_not_toml():
    write("ranks = = 2")
    with pytest.raises(ConfigError, match=r"^latentpool\.toml: cannot be read as TOML: "):
        load()


def test_every_setting_has_a_help_text_and_its_default_is_allowed():
    for name, entry in config.TABLE.items():
        assert entry.metadata["help"].endswith((".", "...", ")")), name
        if entry.default not in (None, ()) and not isinstance(entry.default, tuple):
            assert config.kind_of(name).parse(entry.default) == entry.default, name


def test_secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text("  s3cret\n")
    path.chmod(0o600)
    assert load({"secret_file": str(path)}).secret == b"s3cret"
    assert load().secret == b""
    path.chmod(0o604)
    with pytest.raises(ConfigError, match="everyone on this host can read it; run chmod 600"):
        _ = load({"secret_file": str(path)}).secret
    path.chmod(0o600)
    path.write_text("\n")
    with pytest.raises(ConfigError, match="is empty"):
        _ = load({"secret_file": str(path)}).secret
    os.unlink(path)
    with pytest.raises(ConfigError, match="No such file"):
        _ = load({"secret_file": str(path)}).secret


def test_worker_ports():
    assert load().worker_address(3) == "127.0.0.1:7423"
    assert load({"worker_bind": "10.0.0.1:0"}).worker_address(3) == "10.0.0.1:0"


def test_settings_of_the_split():
    assert (load().borrow, load().audit, load().staging_rows) == (True, False, 32768)
    write("borrow = false\naudit = true\nstaging-rows = 1048576")
    assert (load().borrow, load().audit, load().staging_rows) == (False, True, 1 << 20)
    assert load({"borrow": True, "audit": False}).borrow is True
    assert config.as_flags(load(), ("borrow", "audit")) == ["--no-borrow", "--audit"]


def test_settings_of_kept_prompts():
    assert (load().cache, load().keep_from, load().carry_from, load().keep_replies) == (16 << 30, 4096, 2048, True)
    write('cache = 0\nkeep-from = "1k"\ncarry-from = 64\nkeep-replies = false')
    assert (load().cache, load().keep_from, load().carry_from, load().keep_replies) == (0, 1024, 64, False)
    assert config.as_flags(load(), ("keep_from", "keep_replies")) == ["--keep-from", "1024", "--no-keep-replies"]


def test_one_address_for_the_metrics_of_every_service_of_a_host():
    services = ("router", "pool-manager", "rank-worker")
    assert [load({"rank": "1"}).metrics_address(service) for service in services] == [None] * 3
    told = [load({"rank": rank, "metrics_bind": "127.0.0.1:7430"}) for rank in "07"]
    assert [[settings.metrics_address(service) for service in services] for settings in told] == [
        ["127.0.0.1:7430", "127.0.0.1:7431", "127.0.0.1:7440"],
        ["127.0.0.1:7430", "127.0.0.1:7431", "127.0.0.1:7447"],
    ]
    any_port = load({"rank": "3", "metrics_bind": "127.0.0.1:0"})
    assert {any_port.metrics_address(service) for service in services} == {"127.0.0.1:0"}
