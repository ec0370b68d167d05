"""Writes the log that `latentpool demo` reads to the model: lines of the kind it was trained on, with known words only.

    python -m tools.train_demo.log latentpool/checkpoints/demo/log.txt

The same lines each time.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import Random

from tools.train_demo.grammar import World

LINES = 260
SEED = 1


def lines(seed: int = SEED, count: int = LINES) -> list[str]:
    """`count` lines of a day from six o'clock on, half of them facts. Equal seeds give equal lines."""
    rng = Random(seed)
    world = World.of(rng, count, unknown=0.0)
    minutes = 6 * 60
    found = []
    for _ in range(count):
        minutes += rng.randrange(4)
        if rng.random() < 0.5:
            fact = world.fact()
            template, slots = rng.choice(fact.kind.lines), fact.slots
        else:
            template, slots = world.distractor()
        found.append(f"{minutes // 60:02}:{minutes % 60:02} {template.format(**slots)}")
    return found


def main() -> int:
    Path(sys.argv[1]).write_text("\n".join(lines()) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
