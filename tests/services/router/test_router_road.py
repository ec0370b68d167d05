"""A reply's road through the router, between a fake manager and fake workers."""

from __future__ import annotations

import hashlib
import struct

import pytest
from router_fakes import Rig, reply

from latentpool.sampling import Sampling
from latentpool.v1 import router_pb2

pytestmark = pytest.mark.timeout(30)


async def collect(rig: Rig, prompt, sampling: Sampling, **options):
    return [event async for event in rig.client.generate(prompt, sampling, timeout=20, **options)]


def ids(events) -> list[int]:
    return [t for event in events if isinstance(event, router_pb2.Chunk) for t in event.token_ids]


@pytest.mark.parametrize("world", [1, 2, 3])
async def test_a_reply_is_streamed_with_its_completion(world: int) -> None:
    async with Rig(world) as rig:
        await rig.client.wait_ready(10)
        prompt = [i * 7 % 240 for i in range(150)]
        events = await collect(rig, prompt, Sampling(max_tokens=20, ignore_eos=True, seed=5))
        said = reply(prompt, 20)
        assert ids(events) == said
        *_, completion = events
        assert completion.finish_reason == router_pb2.FINISH_REASON_LENGTH
        assert (completion.usage.prompt_tokens, completion.usage.cached_tokens, completion.usage.generated_tokens) == (
            150,
            0,
            20,
        )
        assert completion.seed == 5
        packed = bytes([1]) + struct.pack(f"<I{150 + 20}I", 150, *prompt, *said)
        assert completion.receipt.sha256 == hashlib.sha256(packed).hexdigest()
        assert completion.receipt.numerics_digest == "n"
        index = 0
        for event in events:
            if isinstance(event, router_pb2.Chunk):
                assert event.first_index == index
                index += len(event.token_ids)
