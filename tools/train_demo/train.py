"""Trains the demonstration model on one GPU, from a seed to a checkpoint in the release's layout.

    python -m tools.train_demo.train RUN --seed 0 --steps 1800 --seconds 500
    python -m tools.train_demo.train RUN --seed 0 --steps 1800 --seconds 500     # goes on where the first stopped
    python -m tools.train_demo.train RUN --toy --steps 20                         # a look, on any CPU

A run stops after --seconds, keeping everything it needs to go on in RUN/state.pt, and writes the checkpoint as it stands.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from latentpool.geometry import Geometry
from tools.train_demo import weights
from tools.train_demo.attention import Focus
from tools.train_demo.batches import Batch, Batches
from tools.train_demo.losses import METRICS, loss_of
from tools.train_demo.model import forward
from tools.train_demo.schedule import SPARSE_FROM, Curriculum, learning_rate
from tools.train_demo.settings import model_config
from tools.train_demo.tokens import build_tokenizer, save_tokenizer

_AHEAD = 24
_LOG_EVERY = 50
_SAVE_SECONDS = 200.0
_CLIP = 1.0
_DECAY = 0.05
_BIAS_STEP = 1e-3


class Trainer:
    """Weights, optimiser and curriculum of a run, and its steps."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        self.args, self.device = args, device
        self.config = model_config(args.toy)
        self.g = Geometry.from_config(self.config)
        self.step = 0
        self.curriculum = Curriculum(args.seed, args.longest)
        self.planned: list[tuple[int, str]] = []  # of the batches that are asked for and not taken
        self.w = {name: tensor.to(device) for name, tensor in weights.initial(self.g, args.seed).items()}
        self.trained = {name: tensor.requires_grad_() for name, tensor in self.w.items() if not name.endswith("mlp.bias")}
        matrices = [t for t in self.trained.values() if t.ndim > 1]
        others = [t for t in self.trained.values() if t.ndim == 1]
        groups = [{"params": matrices, "weight_decay": _DECAY}, {"params": others, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")
        # Clipped apart: none of them may shrink another's gradients.
        self.clipped: list[list[Tensor]] = [[], [], []]
        for name, tensor in self.trained.items():
            self.clipped[1 if ".index." in name else 2 if name.startswith("draft.") else 0].append(tensor)
        self.metrics: list[tuple[int, Tensor]] = []
        self.batches = Batches(args.out / "tokenizer.json", args.seed, args.workers)

    # ---- steps -----------------------------------------------------------------------------------------------------

    def plan(self) -> None:
        """Asks for batches until enough are ahead."""
        while len(self.planned) < _AHEAD:
            number = self.step + len(self.planned)
            self.planned.append(self.curriculum.draw(number))
        for number in range(len(self.batches), len(self.planned)):
            length, kind = self.planned[number]
            self.batches.ask(self.step + number, self.args.tokens, length, kind)

    def train_step(self) -> None:
        self.plan()
        length, _ = self.planned.pop(0)
        batch = self.batches.take()
        sparse = self.step >= SPARSE_FROM * self.args.steps
        tokens, roles, focus = self.upload(batch)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        result = forward(self.w, self.g, tokens, dtype, sparse, focus)
        loss = loss_of(self.w, tokens, roles, result, sparse)
        loss.total.backward()
        for tensors in self.clipped:
            torch.nn.utils.clip_grad_norm_(tensors, _CLIP, foreach=True)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.step, self.args.steps)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for name, load in result.loads.items():
            self.w[name] += _BIAS_STEP * torch.sign(load.mean() - load)
        self.metrics.append((length, loss.metrics))
        self.step += 1
        if self.step % 10 == 0:  # reading values waits for the device
            for seen, metrics in self.metrics[-10:]:
                self.curriculum.learn(seen, float(metrics[METRICS.index("copied_right")]))
            if not bool(torch.isfinite(loss.total)):
                raise SystemExit(f"step {self.step}: the loss is {float(loss.total)}")

    def upload(self, batch: Batch) -> tuple[Tensor, Tensor, Focus | None]:
        def put(array: Any) -> Tensor:
            tensor = torch.from_numpy(array).long()
            return tensor.pin_memory().to(self.device, non_blocking=True) if self.device.type == "cuda" else tensor

        focus = None
        if (batch.sources >= 0).any():
            focus = Focus(put(batch.asked), put(batch.sources), put(batch.others))
        return put(batch.tokens), put(batch.roles), focus

    def report(self, since: float) -> str:
        """A line of means since the last report."""
        means = torch.stack([metrics for _, metrics in self.metrics]).nanmean(0).tolist()
        pace = (time.monotonic() - since) / len(self.metrics) * 1000
        self.metrics = []
        numbers = " ".join(f"{name} {value:.3f}" for name, value in zip(METRICS, means, strict=True))
        return f"step {self.step} length {self.curriculum.length} {numbers} {pace:.0f} ms"

    # ---- keeping ---------------------------------------------------------------------------------------------------

    def save(self) -> None:
        """Writes the checkpoint and, under its name only when whole, the state to go on from."""
        weights.save(self.args.out, self.config, self.g, self.w)
        state = {
            "weights": self.w,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "planned": self.planned,
            "curriculum": self.curriculum.state(),
            "steps": self.args.steps,
        }
        torch.save(state, self.args.out / "state.part")
        (self.args.out / "state.part").rename(self.args.out / "state.pt")

    def resume(self) -> None:
        """Takes up a kept state, if there is one. Every random draw is keyed by seed and step, so none is kept."""
        path = self.args.out / "state.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.device)
        if state["steps"] != self.args.steps or state["curriculum"]["seed"] != self.args.seed:
            raise SystemExit(f"{path}: of a run with other --steps or --seed: give it a directory of its own")
        with torch.no_grad():
            for name, tensor in state["weights"].items():
                self.w[name].copy_(tensor)
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.planned = state["step"], state["planned"]
        self.curriculum = Curriculum(**state["curriculum"])


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="the run's directory: tokenizer, checkpoint and state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=1800, help="of the whole run; default: 1800")
    parser.add_argument("--seconds", type=float, default=520.0, help="after which this call stops; default: 520")
    parser.add_argument("--tokens", type=int, default=65536, help="a step; default: 65536")
    parser.add_argument("--longest", type=int, default=32768, help="conversation in the end; default: 32768")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2), help="processes that write texts")
    parser.add_argument("--toy", action="store_true", help="small widths")
    return parser.parse_args()


def main() -> int:
    began = time.monotonic()
    args = parsed()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    if not (args.out / "tokenizer.json").exists():
        save_tokenizer(build_tokenizer(), args.out / "tokenizer.json")
    trainer = Trainer(args, device)
    trainer.resume()
    print(f"{sum(t.numel() for t in trainer.w.values()):,} parameters on {device}", flush=True)
    reported = saved = time.monotonic()
    while trainer.step < args.steps and time.monotonic() - began < args.seconds:
        trainer.train_step()
        if trainer.step % _LOG_EVERY == 0 or trainer.step in (1, 10):
            print(f"{time.monotonic() - began:.0f} s: {trainer.report(reported)}", flush=True)
            reported = time.monotonic()
        if time.monotonic() - saved > _SAVE_SECONDS:
            trainer.save()
            saved = time.monotonic()
    trainer.save()
    trainer.batches.close()
    peak = f", peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB" if device.type == "cuda" else ""
    print(f"{trainer.step} of {args.steps} steps, {time.monotonic() - began:.0f} s{peak}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
