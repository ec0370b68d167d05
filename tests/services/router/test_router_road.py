"""A reply's road through the router, between a fake manager and fake workers."""

from __future__ import annotations

import asyncio
import hashlib
import struct

import numpy as np
import pytest
from router_fake_model import reply
from router_fakes import Rig

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


async def test_a_crowd_that_comes_and_goes_gets_the_replies_it_would_get_alone() -> None:
    random = np.random.default_rng(11)
    async with Rig(2, lanes=4, pages=40, chunk_rows=128) as rig:
        await rig.client.wait_ready(10)

        async def one(i: int, leaves: bool) -> None:
            prompt = random.integers(0, 240, random.integers(2, 300)).tolist()
            count = int(random.integers(1, 120))
            await asyncio.sleep(random.random() * 0.5)
            if i % 5 == 0:
                events = [e async for e in rig.client.score(prompt, decode_from=1 + len(prompt) // 2)]
                best = [b for part in events if isinstance(part, router_pb2.ScoredRows) for b in part.best_ids]
                assert best == [reply(prompt[: n + 1], 1)[0] for n in range(len(prompt))]
                return
            got: list[int] = []
            async for event in rig.client.generate(prompt, Sampling(max_tokens=count, ignore_eos=True)):
                got += ids([event])
                if leaves and len(got) > count // 2:
                    return
            assert got == reply(prompt, count)

        await asyncio.gather(*(one(i, bool(i % 3 == 0)) for i in range(40)))
