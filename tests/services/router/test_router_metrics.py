"""The router's numbers: every counter has a name and a meaning, conversations count by phase."""

from dataclasses import fields
from types import SimpleNamespace

from latentpool.metrics import families
from services.router.conversations import Phase
from services.router.counters import Counters
from services.router.metrics import HELP, samples


def test_every_counter_is_told_and_explained():
    assert HELP.keys() == {field.name for field in fields(Counters)}
    counters = Counters(**{field.name: index for index, field in enumerate(fields(Counters), 1)})
    told = {sample.name: sample.value for sample in samples(counters, Book([], [])) if sample.kind == "counter"}
    assert told == {f"latentpool_router_{field.name}_total": getattr(counters, field.name) for field in fields(Counters)}
    assert sorted(told.values()) == list(range(1, len(told) + 1))


class Book:
    def __init__(self, queue, seated):
        self.queue = [SimpleNamespace(phase=phase, idle=False) for phase in queue]
        self.seated = [SimpleNamespace(phase=phase, idle=False) for phase in seated]

    def __iter__(self):
        yield from self.seated
        yield from self.queue


def test_conversations_count_by_phase():
    book = Book([Phase.WAITING, Phase.WAITING], [Phase.WAITING, Phase.FILLING, Phase.DECODING, Phase.DECODING])
    told = {(sample.name, sample.labels.get("phase")): sample.value for sample in samples(Counters(), book)}
    phases = {phase: value for (name, phase), value in told.items() if name == "latentpool_router_conversations"}
    assert phases == {"waiting": 3, "filling": 1, "decoding": 2, "parked": 0}
    assert told["latentpool_router_waiting", None] == 2
    assert len(list(families(samples(Counters(), book)))) == len(fields(Counters)) + 2
