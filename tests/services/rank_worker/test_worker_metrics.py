"""A worker's numbers: every kind of link bytes under its name, times and rounds added up."""

from latentpool.v1 import pool_manager_pb2 as pb
from latentpool.v1 import rank_worker_pb2
from services.rank_worker import frames
from services.rank_worker.metrics import Work, samples


def test_bytes_by_kind_and_work_added_up():
    work = Work()
    for seq in range(3):
        work.add(frames.RoundResult(seq, [], 0.5, 0.25, frames.LinkBytes()))
    kinds = [field.name for field in rank_worker_pb2.LinkBytes.DESCRIPTOR.fields]
    sent = {kind: 10**12 + index for index, kind in enumerate(kinds)}
    beat = pb.Heartbeat(sent=rank_worker_pb2.LinkBytes(**sent), resident_bytes=7, loaded_bytes=5)
    told = list(samples(3, work, beat))
    assert {sample.labels["rank"] for sample in told} == {"3"}
    link = {s.labels["kind"]: s.value for s in told if s.name == "latentpool_link_sent_bytes_total"}
    assert link == sent
    others = {s.name.removeprefix("latentpool_worker_"): s.value for s in told if "kind" not in s.labels}
    assert others == {
        "rounds_total": 3,
        "compute_seconds_total": 1.5,
        "exchange_seconds_total": 0.75,
        "resident_bytes": 7,
        "loaded_bytes": 5,
    }
    assert all((s.kind == "counter") == s.name.endswith("_total") for s in told)
