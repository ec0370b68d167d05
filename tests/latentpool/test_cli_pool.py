"""Tables of the pool manager's answers."""

from rich.console import Console

from latentpool.cli import pool


def test_a_narrow_terminal_loses_no_word_of_a_table(capsys):
    row = (
        "0",
        "ready",
        "a-long-host-name",
        "127.0.0.1:7420",
        "221.96 KiB of 221.96 KiB",
        "61.55 MiB",
        "118.02 MiB",
        "1.1 s ago",
    )
    table = pool._table("rank", "state", "host", "address", "loaded", "resident", "room", "heard")
    table.add_row(*row)
    pool._show(Console(width=40), table)
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in row)
