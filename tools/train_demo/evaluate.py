"""Measures a trained checkpoint on a GPU: exact answers by length and depth, turns, and the draft layer's proposals.

    python -m tools.train_demo.evaluate MODEL_DIR --out evaluation.json

An answer is exact if the whole reply, from the first token to the end token, is the right one. Each question stands alone at
the end of a document of its own. The reply is checked in one pass over document and right answer: greedy generation says
exactly that answer if and only if each of its tokens is the best one behind those before it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from latentpool.geometry import Geometry
from tools.train_demo import weights
from tools.train_demo.cases import FIFTHS, Case, make_case
from tools.train_demo.model import forward
from tools.train_demo.tokens import start_worker, worker_vocabulary

_CELLS = {1024: 300, 4096: 300, 16384: 300, 32768: 60, 65536: 20}
"""Questions a fifth of the depth, by length."""
_TURNS, _TURN_LENGTH, _TURN_CASES = 4, 4096, 160
_PASS_TOKENS = 65536
_DRAFT_LENGTH = 4096
"""The draft layer is measured up to here."""


def _make(cell: tuple[int, int, int, int]) -> Case:
    return make_case(worker_vocabulary(), *cell)


@dataclass(slots=True)
class Score:
    """Exact answers of how many, by turn; draft proposals that were the model's own next token, of how many."""

    exact: dict[int, int] = field(default_factory=dict)
    asked: dict[int, int] = field(default_factory=dict)
    taken: int = 0
    proposed: int = 0

    def add(self, case: Case, right: np.ndarray[Any, Any]) -> None:
        """`right` [L]: whether the token at each position was the model's best."""
        for turn in range(int(case.turns[-1]) + 1):
            mine = case.said & (case.turns == turn)
            self.asked[turn] = self.asked.get(turn, 0) + 1
            self.exact[turn] = self.exact.get(turn, 0) + bool(right[mine].all())


def measure(w: weights.Weights, g: Geometry, cases: list[Case], score: Score, sparse: bool) -> None:
    """One pass over cases of one length."""
    device = w["head"].device
    tokens = torch.from_numpy(np.stack([case.tokens for case in cases])).long().to(device)
    said = torch.from_numpy(np.stack([case.said for case in cases])).to(device)
    with torch.no_grad():
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        result = forward(w, g, tokens, dtype, sparse, draft=tokens.shape[1] <= _DRAFT_LENGTH)
        at = (said & (torch.arange(tokens.shape[1], device=device) > 1)).flatten().nonzero()[:, 0]
        best = _best(result.hidden, w["head"], at - 1)
        right = torch.zeros(tokens.numel(), dtype=torch.bool, device=device)
        right[at] = best == tokens.flatten()[at]
        if result.draft is not None:
            score.taken += int((_best(result.draft, w["head"], at - 2) == best).sum())
            score.proposed += len(at)
    for case, row in zip(cases, right.view(tokens.shape).cpu().numpy(), strict=True):
        score.add(case, row)


def _best(hidden: Tensor, head: Tensor, rows: Tensor) -> Tensor:
    return F.linear(hidden[rows], head.to(hidden.dtype)).argmax(-1)


def evaluate(model: Path, part: float, dense: bool) -> Iterator[tuple[str, Score]]:
    """Scores by name: `LENGTH/FIFTH`, then `turns`. `part` of the questions are asked."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    g, loaded = weights.load(model)
    w = {name: tensor.to(device) for name, tensor in loaded.items()}
    processes = max(1, (os.cpu_count() or 2) - 2)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(processes, context, start_worker, (str(model / "tokenizer.json"),)) as pool:
        cells = [
            (f"{length}/{fifth}", [(length, fifth, number, 0) for number in range(max(1, round(count * part)))])
            for length, count in _CELLS.items()
            for fifth in range(FIFTHS)
        ]
        turns = [(_TURN_LENGTH, n % FIFTHS, n, _TURNS - 1) for n in range(max(1, round(_TURN_CASES * part)))]
        made = [(name, pool.map(_make, wanted, chunksize=4)) for name, wanted in [*cells, ("turns", turns)]]
        for name, cases in made:
            score = Score()
            row: list[Case] = []
            for case in cases:
                row.append(case)
                if len(row) * len(case.tokens) >= _PASS_TOKENS:
                    measure(w, g, row, score, not dense)
                    row = []
            if row:
                measure(w, g, row, score, not dense)
            yield name, score


def table(scores: dict[str, Score]) -> str:
    """Percent exact, a row a length and a column a fifth of the depth; turns; the draft layer."""
    lines = ["| length | questions | first fifth | second | third | fourth | last | all |", "|---|---|---|---|---|---|---|---|"]
    for length in sorted({int(name.split("/")[0]) for name in scores if "/" in name}):
        cells = [scores[f"{length}/{fifth}"] for fifth in range(FIFTHS)]
        exact, asked = sum(c.exact[0] for c in cells), sum(c.asked[0] for c in cells)
        columns = " | ".join(f"{100 * c.exact[0] / c.asked[0]:.1f}" for c in cells)
        lines.append(f"| {length:,} | {asked} | {columns} | {100 * exact / asked:.1f} |")
    turns = scores["turns"]
    each = ", ".join(f"{100 * turns.exact[t] / turns.asked[t]:.1f}" for t in sorted(turns.asked))
    lines.append(f"\nTurns of a chat about {_TURN_LENGTH:,} tokens, % exact: {each}.")
    taken, proposed = sum(s.taken for s in scores.values()), sum(s.proposed for s in scores.values())
    lines.append(f"Draft layer: {100 * taken / max(1, proposed):.1f} % of {proposed:,} proposals are the model's own token.")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path, help="also write the scores as JSON")
    parser.add_argument("--part", type=float, default=1.0, help="of the questions to ask; default: 1")
    parser.add_argument("--dense", action="store_true", help="attend to everything instead of the index's selection")
    args = parser.parse_args()
    torch.set_float32_matmul_precision("high")
    began = time.monotonic()
    scores: dict[str, Score] = {}
    for name, score in evaluate(args.model, args.part, args.dense):
        scores[name] = score
        print(f"{time.monotonic() - began:.0f} s: {name} {sum(score.exact.values())}/{sum(score.asked.values())}", flush=True)
    print(table(scores))
    if args.out:
        plain = {n: {"exact": s.exact, "asked": s.asked, "taken": s.taken, "proposed": s.proposed} for n, s in scores.items()}
        args.out.write_text(json.dumps(plain, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
