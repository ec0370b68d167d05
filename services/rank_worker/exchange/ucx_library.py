"""Loads ucxx with the settings that the data plane was measured with. Reasons and figures: docs/data_plane.md."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any

from latentpool.errors import ConfigError

SETTINGS = {
    "UCX_TLS": "tcp,posix,cma,self",
    "UCX_MM_ERROR_HANDLING": "y",
    "UCX_KEEPALIVE_INTERVAL": "1s",
    "UCX_RNDV_THRESH": "inf",
    "UCX_TCP_TX_SEG_SIZE": "128K",
    "UCX_TCP_RX_SEG_SIZE": "128K",
    "UCX_WARN_UNUSED_ENV_VARS": "n",
}
"""Set before ucxx is imported, each only if the user has not set it."""


def open_worker(net_devices: str) -> tuple[Any, Any, Any]:
    """The library's module, its Array, and a new worker with a context of its own, listening on `net_devices` only.

    net_devices: a name as `ip link` shows it, or several with commas. A value of UCX_NET_DEVICES in the environment wins.
    Raises ConfigError for a device that this host does not have and for settings that UCX refuses."""
    for name, value in SETTINGS.items():
        os.environ.setdefault(name, value)
    chosen = os.environ.get("UCX_NET_DEVICES")
    if chosen is None:
        _check_devices(net_devices)
    import ucxx._lib.libucxx as ucx  # here, because ucxx reads the environment when it is imported
    from ucxx._lib.arr import Array

    try:
        context = ucx.UCXContext({} if chosen else {"NET_DEVICES": net_devices}, feature_flags=(ucx.Feature.TAG,))
        return ucx, Array, ucx.UCXWorker(context)
    except ucx.UCXError as error:
        raise ConfigError(f"UCX does not start on network device {chosen or net_devices!r}: {error}") from error


def _check_devices(net_devices: str) -> None:
    # UCX only prints a warning for a device that it does not know, and goes on without it.
    infiniband = Path("/sys/class/infiniband")
    there = [name for _, name in socket.if_nameindex()]
    there += [entry.name for entry in infiniband.iterdir()] if infiniband.is_dir() else []
    for device in net_devices.split(","):
        if device.split(":")[0] not in there:
            raise ConfigError(f"network device {device!r} for the link: this host has {', '.join(there)}")
