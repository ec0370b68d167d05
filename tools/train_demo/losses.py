"""The training loss: next tokens by what they are, attention on sources, the index, and the draft layer's next tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 (its customary name)
from torch import Tensor

from tools.train_demo.documents import CONTEXT, COPIED, PADDING, SAID
from tools.train_demo.layers import fused, linear
from tools.train_demo.model import Result
from tools.train_demo.weights import Weights

_WEIGHTS = {COPIED: 1.0, SAID: 0.5, CONTEXT: 0.05}
DENSE_ATTENTION, SPARSE_ATTENTION = 0.5, 0.1
"""Weight of a layer's attention supervision in either phase."""
METRICS = ("copied", "said", "context", "copied_right", "said_right", "on_source", "index", "draft_right")


@dataclass(frozen=True, slots=True)
class Loss:
    """`total` to differentiate; `metrics` [len(METRICS)], detached: mean losses by role, accuracies, attention on the source
    and the index's divergence (means over layers). NaN where a batch has no such token."""

    total: Tensor
    metrics: Tensor


@fused
def _token_losses(hidden: Tensor, head: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """hidden [T, d], targets [T] -> cross-entropy and whether the best token is right, [T] f32 each."""
    logits = linear(hidden, head).float()
    return F.cross_entropy(logits, targets, reduction="none"), (logits.argmax(-1) == targets).float()


def ahead(values: Tensor, steps: int, fill: int) -> Tensor:
    """values [B, L] of the token `steps` later, flat [B L]; `fill` where a conversation has ended."""
    later = torch.full_like(values, fill)
    later[:, :-steps] = values[:, steps:]
    return later.flatten()


def _weighted(values: Tensor, roles: Tensor) -> Tensor:
    """The mean of values [T] over each role's tokens, weighted; a role without tokens adds nothing."""
    total = torch.zeros((), device=values.device)
    for role, weight in _WEIGHTS.items():
        chosen = roles == role
        total = total + weight * (values * chosen).sum() / chosen.sum().clamp(min=1)
    return total


def _mean(values: Tensor, chosen: Tensor) -> Tensor:
    """The mean of values [T] over the chosen tokens, detached: NaN if there are none."""
    return (values.detach() * chosen).sum() / chosen.sum()


def loss_of(w: Weights, tokens: Tensor, roles: Tensor, result: Result, sparse: bool) -> Loss:
    """tokens, roles [B, L]; `result` of the forward pass on these tokens."""
    next_roles = ahead(roles, 1, PADDING)
    each, right = _token_losses(result.hidden, w["head"], ahead(tokens, 1, 0))
    total = _weighted(each, next_roles)
    draft_right = torch.full_like(total, torch.nan)
    if result.draft is not None:
        draft_roles = ahead(roles, 2, PADDING)
        drafted, draft_hits = _token_losses(result.draft, w["head"].detach(), ahead(tokens, 2, 0))
        total = total + _weighted(drafted, draft_roles)
        draft_right = _mean(draft_hits, (draft_roles == COPIED) | (draft_roles == SAID))
    layers = list(result.supervisions.values())
    on_source = divergence = torch.full_like(total, torch.nan)
    if layers:
        attention = sum(layer.attention for layer in layers) * (SPARSE_ATTENTION if sparse else DENSE_ATTENTION)
        total = total + attention + sum(layer.index for layer in layers)
        on_source = torch.stack([layer.on_source for layer in layers]).mean()
        divergence = torch.stack([layer.index.detach() for layer in layers]).mean()
    losses = [_mean(each, next_roles == role) for role in (COPIED, SAID, CONTEXT)]
    rights = [_mean(right, next_roles == role) for role in (COPIED, SAID)]
    return Loss(total, torch.stack([*losses, *rights, on_source, divergence, draft_right]).detach())
