"""`latentpool bench`: the drawn load, its statistics on stated event times, its bounds, and tiny runs on real groups."""

import asyncio
import itertools
import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from latentpool.cli import bench as command
from latentpool.cli.app import app
from latentpool.cli.load import Load, Trace, Workload, draw, summary
from latentpool.errors import BusyError
from latentpool.v1 import router_pb2 as pb

MODEL = Path(__file__).parents[1] / "data" / "oracle" / "tiny"
WORK = Workload(requests=400, prompt_tokens=100, reply_tokens=30, spread=0.5, seed=3)


@pytest.fixture(autouse=True)
def nothing_configured(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def run(*arguments):
    return CliRunner().invoke(app, ["bench", *arguments], env={"COLUMNS": "120"})


# ---- what is drawn -------------------------------------------------------------------------------------------------


def test_the_same_seed_draws_the_same_requests_and_another_draws_others():
    assert list(draw(WORK, 512, 4096)) == list(draw(WORK, 512, 4096))
    assert list(draw(WORK, 512, 4096)) != list(draw(replace(WORK, seed=4), 512, 4096))


def test_a_request_does_not_depend_on_how_many_there_are_or_when_they_arrive():
    few = list(draw(replace(WORK, requests=5, rate=2.0), 512, 4096))
    assert [r.prompt for r in few] == [r.prompt for r in itertools.islice(draw(WORK, 512, 4096), 5)]


def test_lengths_are_log_normal_around_their_medians():
    drawn = list(draw(WORK, 512, 4096))
    for lengths, median in (([len(r.prompt) for r in drawn], 100), ([r.sampling.max_tokens for r in drawn], 30)):
        logs = np.log(lengths)
        assert np.exp(np.median(logs)) == pytest.approx(median, rel=0.15)
        assert np.std(logs) == pytest.approx(0.5, rel=0.15)


def test_requests_fit_the_group():
    for request in draw(replace(WORK, prompt_tokens=90, spread=2.0), 300, 100):
        assert len(request.prompt) >= 1
        assert request.sampling.max_tokens >= 1
        assert len(request.prompt) + request.sampling.max_tokens <= 100
        assert min(request.prompt) >= 0
        assert max(request.prompt) < 150
        assert request.sampling.ignore_eos


def test_what_is_cut_to_the_context_is_marked():
    work = replace(WORK, prompt_tokens=90, spread=1.0)
    whole, cut = list(draw(work, 300, 1 << 20)), list(draw(work, 300, 120))
    assert not any(request.cut for request in whole)
    assert 0 < sum(request.cut for request in cut) < len(cut)
    for long, short in zip(whole, cut, strict=True):
        longer = len(long.prompt) + long.sampling.max_tokens > 120
        assert short.cut == longer
        assert (len(short.prompt), short.sampling.max_tokens) != (len(long.prompt), long.sampling.max_tokens) or not longer


def test_a_note_says_how_many_were_cut(capsys):
    told = summary([Trace(0.0, 4, cut=True), Trace(0.0, 4), Trace(0.0, 4, cut=True)], 1.0)
    Console(width=200).print(command.picture(told))
    assert "note: 2 of 3 requests were drawn longer than the group's context and cut to it" in capsys.readouterr().out
    Console(width=200).print(command.picture(summary([Trace(0.0, 4)], 1.0)))
    assert "note" not in capsys.readouterr().out


def test_arrivals_are_poisson():
    arrivals = [request.arrival for request in draw(replace(WORK, rate=20.0), 512, 4096)]
    gaps = np.diff([0.0, *arrivals])
    assert gaps.min() > 0
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.15)
    assert gaps.std() == pytest.approx(1 / 20, rel=0.25)  # as wide as its mean: exponential
    assert {request.arrival for request in draw(WORK, 512, 4096)} == {0.0}


# ---- statistics ----------------------------------------------------------------------------------------------------


def test_statistics_of_stated_times():
    draws = np.random.default_rng(1)
    traces = []
    for index in range(40):
        times = 10.0 + index + np.cumsum(draws.exponential(0.1, 1 + index % 7))
        traces.append(
            Trace(
                10.0 + index,
                5,
                times.tolist(),
                finished=times[-1] + 0.5,
                queued_seconds=index / 8,
                parked=index % 3,
                carried=index % 2,
            )
        )
    told = summary(traces, 50.0)

    def matches(shown, values):
        expected = [np.mean(values), *np.percentile(values, [50, 90, 99]), max(values)]
        np.testing.assert_allclose([shown[name] for name in ("mean", "p50", "p90", "p99", "max")], expected)

    matches(told["first_token_seconds"], [t.token_times[0] - t.due for t in traces])
    matches(told["gap_seconds"], np.concatenate([np.diff(t.token_times) for t in traces]))
    matches(told["queued_seconds"], np.arange(40) / 8)
    matches(told["request_seconds"], [t.token_times[-1] + 0.5 - t.due for t in traces])
    tokens = sum(1 + index % 7 for index in range(40))
    assert told["reply_tokens"] == tokens
    assert told["reply_tokens_per_second"] == pytest.approx(tokens / 50)
    assert told["requests_per_second"] == pytest.approx(40 / 50)
    assert told["prompt_tokens"] == 200
    assert told["times_parked"] == sum(index % 3 for index in range(40))
    assert told["times_carried"] == 20
    assert told["requests"] == {"sent": 40, "finished": 40, "failed": 0, "unfinished": 0, "parked": 26, "cut_to_context": 0}


def test_failed_and_cut_off_requests_are_counted_apart():
    traces = [
        Trace(0.0, 4, [1.0, 1.5], finished=1.6),
        Trace(0.0, 4, [2.0, 5.0]),  # cut off: its tokens came all the same
        Trace(0.0, 4, error="BusyError: full"),
        Trace(0.0, 4, error="BusyError: full"),
        Trace(0.0, 4, error="EpochError: gone"),
    ]
    told = summary(traces, 10.0)
    assert told["requests"] == {"sent": 5, "finished": 1, "failed": 3, "unfinished": 1, "parked": 0, "cut_to_context": 0}
    assert told["errors"] == {"BusyError: full": 2, "EpochError: gone": 1}
    assert told["reply_tokens"] == 4
    assert told["gap_seconds"]["max"] == 3.0
    assert told["request_seconds"]["max"] == 1.6
    assert told["prompt_tokens"] == 8


def test_nothing_has_no_statistics_and_still_a_picture():
    told = summary([], 0.0)
    assert told["gap_seconds"] is None
    assert told["reply_tokens_per_second"] == 0.0
    command.picture(told)


# ---- how requests are sent, on a clock that the test moves ---------------------------------------------------------


class Fake:
    """A router whose replies take a stated time, on the event loop's clock."""

    def __init__(self, seconds, error=None):
        self.seconds, self.error = seconds, error
        self.running = self.most = self.cancelled = 0
        self.begun = []

    async def generate(self, prompt, sampling=None):
        self.begun.append(asyncio.get_running_loop().time())
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            if self.error:
                raise self.error
            yield pb.Waiting(ahead=1)
            await asyncio.sleep(self.seconds)
            yield pb.Chunk(token_ids=[1])
            yield pb.Chunk(first_index=1, token_ids=[2, 3])
            yield pb.Completion(usage=pb.Usage(parked=2), timings=pb.Timings(queued_seconds=0.25))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1


async def loaded(fake, workload, seconds=30.0, stop=None):
    load = Load(fake, workload, asyncio.get_running_loop().time)
    await load.run(512, 256, seconds, stop or asyncio.Event())
    return load


async def test_a_closed_loop_keeps_as_many_running_as_it_was_told():
    fake = Fake(0.01)
    load = await loaded(fake, replace(WORK, requests=10, concurrency=3))
    assert fake.most == 3
    assert len(load.traces) == 10
    assert all(t.finished is not None and t.parked == 2 and t.queued_seconds == 0.25 for t in load.traces)
    assert all(len(t.token_times) == 3 and t.token_times[1] == t.token_times[2] for t in load.traces)


async def test_an_open_loop_does_not_wait_for_replies():
    workload = replace(WORK, requests=12, rate=200.0)
    fake = Fake(1.0)
    load = await loaded(fake, workload)
    assert fake.most == 12
    due = [request.arrival for request in draw(workload, 512, 256)]
    np.testing.assert_allclose(np.array([t.due for t in load.traces]) - load.traces[0].due, np.array(due) - due[0])
    assert all(begun >= trace.due for begun, trace in zip(fake.begun, load.traces, strict=True))


async def test_errors_of_requests_are_counted_and_the_load_goes_on():
    fake = Fake(0.0, BusyError("all lanes are busy"))
    load = await loaded(fake, replace(WORK, requests=7, concurrency=2))
    assert summary(load.traces, load.seconds)["errors"] == {"BusyError: all lanes are busy": 7}


async def test_a_defect_of_the_client_is_no_statistic():
    with pytest.raises(ExceptionGroup):
        await loaded(Fake(0.0, KeyError("bug")), replace(WORK, requests=2))


@pytest.mark.parametrize("rate", [None, 1000.0])
@pytest.mark.parametrize("how", ["time", "stop"])
async def test_time_and_interruption_end_a_load_and_cancel_what_runs(rate, how):
    fake, stop = Fake(1e6), asyncio.Event()
    if how == "stop":
        asyncio.get_running_loop().call_later(0.05, stop.set)
    load = await loaded(fake, replace(WORK, requests=4, concurrency=4, rate=rate), 0.05 if how == "time" else 60.0, stop)
    assert fake.running == 0
    assert fake.cancelled == len(load.traces) > 0
    assert summary(load.traces, load.seconds)["requests"]["unfinished"] == len(load.traces)


# ---- the command ---------------------------------------------------------------------------------------------------

SMALL = ("--model", str(MODEL), "--transport", "inproc", "--page-rows", "64", "--context", "256", "--dtype", "f32")


@pytest.mark.parametrize("how", [("--concurrency", "3"), ("--rate", "50")])
def test_a_temporary_group(how, tmp_path):
    lengths = ("--requests", "6", "--prompt-tokens", "20", "--reply-tokens", "5")
    result = run(*SMALL, "--ranks", "2", "--parallel", "2", *lengths, *how, "--seed", "5", "--json", "load.json")
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "load.json").read_text())
    workload = Workload(6, 20, 5, 0.7, 5, rate=50.0 if how[0] == "--rate" else None)
    drawn = list(draw(workload, report["group"]["vocab_size"], 256))
    results = report["results"]
    assert results["requests"] == {"sent": 6, "finished": 6, "failed": 0, "unfinished": 0, "parked": 0, "cut_to_context": 0}
    assert results["reply_tokens"] == sum(request.sampling.max_tokens for request in drawn)
    assert results["prompt_tokens"] == sum(len(request.prompt) for request in drawn)
    assert report["group"]["world"] == 2
    assert report["group"]["lanes"] == 2
    assert report["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert report["machine"]["versions"]["numpy"] == np.__version__
    assert report["workload"]["seconds"] == 60.0
    assert "6 requests in" in result.stdout
    assert "to the first token" in result.stdout


def test_ctrl_c_reports_what_there_is(monkeypatch, tmp_path):
    class Interrupted(Load):
        def _note(self, trace, event):
            super()._note(trace, event)
            if len(self.traces) == 2 and trace.token_times:
                os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(command, "Load", Interrupted)
    lengths = ("--requests", "50", "--prompt-tokens", "20", "--reply-tokens", "50", "--spread", "0")
    result = run(*SMALL, "--ranks", "1", "--concurrency", "1", *lengths, "--json", "load.json")
    assert result.exit_code == 130, result.output
    report = json.loads((tmp_path / "load.json").read_text())
    assert report["interrupted"]
    requests = report["results"]["requests"]
    assert (requests["sent"], requests["finished"], requests["unfinished"]) == (2, 1, 1)
    assert 50 < report["results"]["reply_tokens"] < 100
    assert "2 requests in" in result.stdout
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_group_of_which_no_request_finishes_fails(tmp_path):
    lengths = ("--prompt-tokens", "8", "--reply-tokens", "240", "--spread", "0")  # a longer prompt leaves no room to reply
    result = run(*SMALL, "--ranks", "1", "--requests", "1", *lengths, "--seconds", "0.1")
    assert result.exit_code == 1
    assert "1 cut off" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--rate", "1", "--concurrency", "2"), "--rate is an open loop and --concurrency a closed one"),
        (("--rate", "0"), "--rate 0: above 0"),
        (("--model", str(MODEL), "--kv-cache", "fp8"), "--kv-cache fp8 is not served yet"),
    ],
)
def test_wrong_usage_is_one_line(arguments, message):
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_a_report_that_cannot_be_written_is_refused_before_the_load():
    result = run(*SMALL, "--ranks", "1", "--json", "absent/load.json")
    assert result.exit_code == 2
    assert "--json absent/load.json" in result.stderr
    assert "requests in" not in result.stdout


def test_nothing_listens_at_the_address():
    result = run("--address", "127.0.0.1:1")
    assert result.exit_code == 1
    assert "no router answers at 127.0.0.1:1" in result.stderr


def test_help_teaches_by_example():
    shown = run("--help")
    assert shown.exit_code == 0
    assert "latentpool bench --rate" in shown.stdout
    assert "--json" in shown.stdout
