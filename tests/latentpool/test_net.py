"""What counts as this machine's own address."""

import pytest

from latentpool.net import is_loopback


@pytest.mark.parametrize("address", ["localhost:1", "127.0.0.1:0", "127.8.9.10:7410", "[::1]:7410"])
def test_loopback(address):
    assert is_loopback(address)


@pytest.mark.parametrize("address", ["0.0.0.0:1", "10.0.0.1:7410", "[::]:7410", "node0:7410", "127.example.org:7410"])
def test_addresses_that_others_reach(address):
    assert not is_loopback(address)
