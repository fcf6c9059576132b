"""Requests that step together: the tokens of each alone, room and preemption, order, errors, slow readers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from copy import deepcopy
from functools import cache, partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from radixkv import audit
from radixkv.config import Tenant
from radixkv.engines.calls import generating, is_stepping
from radixkv.engines.hf import HFEngine
from radixkv.engines.hf.batch import MAX_ROWS
from radixkv.engines.hf.room import OutputLengths
from radixkv.engines.protocol import Generation, Tally
from radixkv.engines.steps import Steps
from radixkv.errors import CapacityError, StaleGeneration
from radixkv.service.engine_loop import EngineLoop, Work
from tests.engines.support import engine_over, model_of, prompt_of, stock
from tests.tiers.support import PATIENT_S
from tests.waiting import LIMIT_S, ended, eventually

pytestmark = pytest.mark.slow


def seeds(num: int, num_releases: int) -> list[Any]:
    """The first ``num`` seeds of a test; the others up to ``num_releases`` are for releases."""
    return [
        *range(num),
        *(pytest.param(seed, marks=pytest.mark.release) for seed in range(num, num_releases)),
    ]


MODES: tuple[dict[str, Any], ...] = (
    {},
    {"do_sample": True, "seed": 1},
    {"do_sample": True, "seed": 2, "num_return_sequences": 3},
    {"do_sample": True, "seed": 3, "temperature": 1.5, "top_k": 20, "top_p": 0.8},
    {"num_beams": 3},
    {},
)


class Call:
    """A ``generate`` call of a tenant, and how often ``stop`` may be asked before it is true."""

    def __init__(self, tenant: str, prompt: Any, num: int, most: int | None = None, **mode: Any) -> None:
        self.tenant, self.prompt, self.num, self.most, self.mode = tenant, prompt, num, most, mode
        self.num_asked = 0

    def run(self, engine: HFEngine, work: Work[Any]) -> Steps[Generation]:
        def stop() -> bool:
            self.num_asked += 1
            return work.stopping or self.num_asked == self.most

        options, admission = {"eos_token_id": -1} | self.mode, work.admission(lambda: None)
        ns = engine.namespace(self.tenant)
        return generating(engine, ns, self.prompt, self.num, admission, stop=stop, **options)

    def expected(self, engine: HFEngine) -> list[list[int]]:
        """The tokens by transformers alone."""
        return _alone(engine.model, tuple(self.prompt), self.num, tuple(self.mode.items()))


@cache
def _alone(
    model: PreTrainedModel, prompt: tuple[int, ...], num: int, mode: tuple[tuple[str, Any], ...]
) -> list[list[int]]:
    return stock(model, [[*prompt]], num, eos=None, **dict(mode))


@contextmanager
def begun(engine: HFEngine, calls: list[Call]) -> Iterator[tuple[EngineLoop, list[Work[Generation]]]]:
    """Make the calls at the same time, through the service's loop. All wait before the first one begins.

    They begin in this order, and go on in an order that is the same each time.
    """
    loop, held = loop_of(engine), threading.Event()
    try:
        loop.call("first", lambda _: held.wait(LIMIT_S))
        works = [loop.submit(call.tenant, partial(call.run, engine)) for call in calls]
        held.set()
        yield loop, works
    finally:
        held.set()
        loop.close()


def loop_of(engine: HFEngine) -> EngineLoop:
    """A loop that runs an engine, as the service makes it."""
    together = engine.limits.num_together
    return EngineLoop(100, num_together=together, engine=engine if is_stepping(engine) else None)


def together(engine: HFEngine, calls: list[Call]) -> list[Generation]:
    """Make the calls at the same time: see ``begun``. Return their results."""
    with begun(engine, calls) as (_, works):
        return [work.future.result(LIMIT_S) for work in works]


@contextmanager
def forwards(engine: HFEngine, sizes: list[int] | None = None) -> Iterator[list[int]]:
    """The tokens of each forward of the model. ``sizes``: a list that gets them."""
    sizes = [] if sizes is None else sizes
    handle = engine.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    try:
        yield sizes
    finally:
        handle.remove()


# --- the same tokens


@pytest.mark.parametrize("chunk_tokens", [7, 512])
def test_requests_of_all_tenants_step_together_and_get_their_own_tokens(chunk_tokens: int) -> None:
    with engine_over(model_of(), num_blocks=800, chunk_tokens=chunk_tokens) as engine:
        calls = [
            Call(f"t{n % 3}", prompt_of(20)[: 9 + n] + prompt_of(8 + n, n), 20 + n, **MODES[n % len(MODES)])
            for n in range(12)
        ]
        with forwards(engine) as sizes:
            made = together(engine, calls)
        for call, one in zip(calls, made, strict=True):
            assert one.token_ids == call.expected(engine)
        assert len(sizes) < sum(call.num for call in calls) / 3, "most forwards serve several requests"


def test_threads_need_no_worker() -> None:
    with engine_over(model_of(), num_blocks=800) as engine:
        prompts = [prompt_of(20)[:12] + prompt_of(5 + n, n) for n in range(8)]
        gate = threading.Barrier(8)

        def one(n: int) -> Generation:
            begun: list[int] = []

            def stop() -> bool:
                """After its prompt, wait for the prompts of the others."""
                if not begun:
                    begun.append(gate.wait(LIMIT_S))
                return False

            return engine.generate(engine.namespace("acme"), prompts[n], 30, eos_token_id=-1, stop=stop)

        with forwards(engine) as sizes, ThreadPoolExecutor(8) as pool:
            made = [each.token_ids for each in pool.map(one, range(8))]
        assert made == [stock(engine.model, [prompt], 30, eos=None) for prompt in prompts]
        assert len(sizes) < 8 * 30 / 3


@pytest.mark.parametrize("architecture", ["gpt2", "opt", "falcon"])
def test_other_architectures(architecture: str) -> None:
    """Falcon has an attention of its own, so its requests take turns."""
    with engine_over(model_of(architecture)) as engine:
        calls = [Call("acme", prompt_of(9 + n, n), 12, **MODES[n]) for n in range(4)]
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert engine.limits.num_together == (1 if architecture == "falcon" else 32)


def test_rows_that_end_early_leave_the_others_alone() -> None:
    with engine_over(model_of()) as engine:
        prompt = prompt_of(15)
        eos = stock(engine.model, [prompt], 12, eos=None)[0][4]
        modes: list[dict[str, Any]] = [{}, {"do_sample": True, "seed": 4, "num_return_sequences": 4}]
        calls = [Call(f"t{n}", prompt, 30, eos_token_id=eos, **mode) for n, mode in enumerate(modes * 2)]
        for one, mode in zip(together(engine, calls), modes * 2, strict=True):
            assert one.token_ids == stock(engine.model, [prompt], 30, eos=eos, **mode)


def test_processors_of_the_models_own_generation_config() -> None:
    """A repetition penalty of the model's files is applied, to each request by its own tokens."""
    model = deepcopy(model_of("qwen2"))
    model.generation_config.repetition_penalty = 1.8
    with engine_over(model) as engine:
        calls = [Call("acme", prompt_of(9 + n, n), 15, **MODES[n]) for n in range(4)]
        made = [one.token_ids for one in together(engine, calls)]
        assert made == [call.expected(engine) for call in calls]
    assert made[0] != stock(model_of("qwen2"), [calls[0].prompt], 15, eos=None), (
        "the penalty changes the tokens"
    )


def test_a_prefix_that_several_lack_is_computed_once() -> None:
    with engine_over(model_of(), num_blocks=800, chunk_tokens=64) as engine:
        head = prompt_of(200)
        calls = [Call("acme", [*head, *prompt_of(6, n)], 4) for n in range(6)]
        with forwards(engine) as sizes:
            made = together(engine, calls)
        assert [one.num_cached_tokens[0] for one in made] == [0, *[200] * 5]
        assert sum(sizes) == 200 + 6 * 6 + 6 * 3


# --- cancelling, errors, readers


def test_a_request_ends_at_a_step_and_the_others_go_on() -> None:
    with engine_over(model_of(), num_blocks=800) as engine:
        calls = [Call("acme", prompt_of(20, n), 40, most=6 if n == 1 else None) for n in range(3)]
        made = together(engine, calls)
        for n, (call, one) in enumerate(zip(calls, made, strict=True)):
            whole = call.expected(engine)[0]
            assert one.token_ids[0] == (whole[: len(one.token_ids[0])] if n == 1 else whole)
        assert 0 < len(made[1].token_ids[0]) <= 6
        turn = [*calls[1].prompt, *made[1].token_ids[0], 5, 5, 5, 5]
        computed = 20 + len(made[1].token_ids[0]) - 1
        assert engine.cache.match(engine.namespace("acme"), turn).num_tokens == computed // 4 * 4


def test_a_purge_ends_the_requests_of_its_tenant_alone() -> None:
    with engine_over(model_of()) as engine:
        purged: list[int] = []

        def purge(step: list[list[int]]) -> None:
            if not purged:
                purged.append(engine.cache.purge("acme"))

        calls = [Call("acme", prompt_of(12, 1), 30), Call("globex", prompt_of(12), 30, on_step=purge)]
        with begun(engine, calls) as (_, works):
            assert isinstance(works[0].future.exception(LIMIT_S), StaleGeneration)
            made = works[1].future.result(LIMIT_S)
        assert made.token_ids == stock(engine.model, [prompt_of(12)], 30, eos=None)


def test_an_error_of_the_model_ends_the_requests_in_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_over(model_of()) as engine:
        assert engine._batch is not None
        forward = engine._batch._forward
        run, num = forward.run, 0

        def failing(*step: Any) -> torch.Tensor:
            nonlocal num
            num += 1
            if num == 5:
                raise ZeroDivisionError("the device failed")
            return run(*step)

        monkeypatch.setattr(forward, "run", failing)
        calls = [Call("acme", prompt_of(12, n), 30) for n in range(3)]
        with begun(engine, calls) as (loop, works):
            assert {type(work.future.exception(LIMIT_S)) for work in works} == {ZeroDivisionError}
            again = loop.submit("acme", partial(calls[0].run, engine))
            assert again.future.result(LIMIT_S).token_ids == calls[0].expected(engine)


def test_a_step_that_was_interrupted_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The caller that is interrupted ends; a request beside it goes on without losing a token."""
    with engine_over(model_of()) as engine:
        assert engine._batch is not None
        forward = engine._batch._forward
        run, num = forward.run, 0
        victims: list[threading.Thread] = []

        def interrupted(*step: Any) -> torch.Tensor:
            nonlocal num
            num += 1
            found = run(*step)
            if num == 8:
                victims.append(threading.current_thread())
                raise KeyboardInterrupt
            return found

        monkeypatch.setattr(forward, "run", interrupted)
        expected = [stock(engine.model, [prompt_of(12, n)], 30, eos=None) for n in range(2)]
        results: dict[int, Any] = {}

        def one(n: int) -> None:
            try:
                results[n] = engine.generate(
                    engine.namespace("acme"), prompt_of(12, n), 30, eos_token_id=-1
                ).token_ids
            except KeyboardInterrupt:
                results[n] = threading.current_thread()

        threads = [threading.Thread(target=one, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            ended(thread)
        hit = next(n for n in results if results[n] is victims[0])
        assert results[1 - hit] == expected[1 - hit]


def test_a_slow_reader_doesnt_stop_the_others_and_is_one_step_behind_at_most() -> None:
    with engine_over(model_of(), num_blocks=800) as engine:
        go_on, seen = threading.Event(), list[int]()

        def on_step(step: list[list[int]]) -> None:
            seen.append(step[0][0])
            if len(seen) == 3:
                assert go_on.wait(LIMIT_S)

        def slow() -> Generation:
            return engine.generate(
                engine.namespace("acme"), prompt_of(12), 10, eos_token_id=-1, on_step=on_step
            )

        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(slow)
            eventually(lambda: len(seen) == 3, "the third step")
            for n in range(3):
                made = engine.generate(engine.namespace("globex"), prompt_of(9, n), 20, eos_token_id=-1)
                assert made.token_ids == stock(engine.model, [prompt_of(9, n)], 20, eos=None)
            (member,) = engine._batch._running  # type: ignore[union-attr]
            assert member.num_chosen == 4 and len(seen) == 3
            go_on.set()
            assert waiting.result(LIMIT_S).token_ids == stock(engine.model, [prompt_of(12)], 10, eos=None)


# --- room


def preempted(engine: HFEngine) -> int:
    assert engine._batch is not None
    return engine._batch.preemptions.total()


@pytest.mark.parametrize("num_blocks", [30, 70])
def test_requests_that_outgrow_the_pool_resume_without_losing_a_token(num_blocks: int) -> None:
    """All outputs are longer than what was learned, so growth fails: of some, several times."""
    with engine_over(model_of(), num_blocks=num_blocks) as engine:
        together(engine, [Call("acme", prompt_of(8, n), 2) for n in range(4)])  # learned: 2 tokens
        modes = [MODES[n % 4] for n in range(8)]
        calls = [Call("acme", prompt_of(13 + n, n), 25, **mode) for n, mode in enumerate(modes)]
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert preempted(engine) > 0
        assert {*engine.preemptions()} == {("acme", "pool")}
        audit.check(engine.cache)


def test_a_beam_search_takes_the_room_of_others_to_grow() -> None:
    with engine_over(model_of(), num_blocks=45) as engine:
        together(engine, [Call("acme", prompt_of(8, n), 2) for n in range(4)])  # learned: 2 tokens
        calls = [Call("acme", prompt_of(13 + n, n), 25) for n in range(5)]
        calls.insert(1, Call("acme", prompt_of(15, 9), 25, num_beams=4, num_return_sequences=2))
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert preempted(engine) > 0


@pytest.mark.parametrize(("num_blocks", "guaranteed"), [(30, 12), (45, 0)])
def test_beam_searches_wait_rather_than_fail(num_blocks: int, guaranteed: int) -> None:
    """Each fits alone; several that grow together don't, and none of them can be preempted."""
    with engine_over(model_of(), num_blocks=num_blocks + guaranteed) as engine:
        engine.cache.add_tenant(Tenant("idle", guaranteed_blocks=guaranteed))
        engine.cache.add_tenant(Tenant("few", max_blocks=30))
        together(engine, [Call("acme", prompt_of(8, n), 2) for n in range(4)])  # learned: 2 tokens
        calls = [Call(("acme", "few")[n % 2], prompt_of(13 + n, n), 25, num_beams=3) for n in range(5)]
        calls.append(Call("acme", [prompt_of(6, 20), prompt_of(7, 21)], 9, num_beams=2))
        made = together(engine, calls)
        assert [one.token_ids for one in made[:5]] == [call.expected(engine) for call in calls[:5]]
        assert made[5].token_ids == stock(engine.model, calls[5].prompt, 9, eos=None, num_beams=2)
        audit.check(engine.cache)


def test_small_beam_searches_run_beside_each_other() -> None:
    with engine_over(model_of(), num_blocks=200) as engine:
        calls = [Call("acme", prompt_of(13 + n, n), 25, num_beams=3) for n in range(4)]
        with forwards(engine) as sizes:
            made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert len(sizes) < 60, "not one after another"


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(1, 4))
def test_32_at_a_time_with_room_for_8_all_end(seed: int) -> None:
    """Greedy, several samples, beams, long prompts and warms: none is refused for memory, each has its own tokens."""
    draw = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    with engine_over(model_of(), num_blocks=8 * 12) as engine:
        together(engine, [Call("t0", prompt_of(8, n), 2) for n in range(4)])  # learned: 2 tokens
        calls = []
        for n in range(32):
            mode, is_long = (
                (*MODES[:5], {"num_beams": 4, "num_return_sequences": 2})[pick(0, 6)],
                not pick(0, 4),
            )
            length, most = (90 + pick(0, 60), 8) if is_long else (8 + pick(0, 20), pick(10, 40))
            calls.append(Call(f"t{n % 3}", prompt_of(length, n), most, **mode))
        warms = [prompt_of(150 + n, 100 + n) for n in range(4)]
        with ThreadPoolExecutor(4) as pool:
            warmed = [
                pool.submit(engine.prefill, engine.namespace("t1"), each, on_no_room=lambda _: True)
                for each in warms
            ]
            made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert [each.result().num_tokens for each in warmed] == [len(each) for each in warms]
        audit.check(engine.cache)


def test_a_beam_search_that_is_cancelled_leaves_the_others_alone() -> None:
    with engine_over(model_of()) as engine:
        calls = [Call("acme", prompt_of(15), 25, most=7, num_beams=3), Call("acme", prompt_of(12, 1), 25)]
        made = together(engine, calls)
        assert 0 < len(made[0].token_ids[0]) < 25
        assert made[1].token_ids == calls[1].expected(engine)


def test_what_was_learned_avoids_preemption() -> None:
    with engine_over(model_of(), num_blocks=40) as engine:
        together(engine, [Call("acme", prompt_of(8, n), 25) for n in range(4)])
        before = preempted(engine)
        calls = [Call("acme", prompt_of(12, n), 25) for n in range(12)]
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert preempted(engine) == before


def test_a_request_that_fits_alone_is_never_refused() -> None:
    """Prompt and output take the whole pool. It waits for the others, and for nothing that is idle."""
    with engine_over(model_of(), num_blocks=12) as engine:
        calls = [Call("acme", prompt_of(20 + n, n), 48 - 20 - n + 1) for n in range(5)]
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]


def test_a_limit_of_its_own_tenant_is_the_reason_of_a_preemption() -> None:
    with engine_over(model_of(), num_blocks=200) as engine:
        engine.cache.add_tenant(Tenant("acme", max_blocks=20))
        together(engine, [Call("acme", prompt_of(8, n), 2) for n in range(4)])  # learned: 2 tokens
        calls = [Call("acme", prompt_of(13 + n, n), 25) for n in range(5)]
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert {*engine.preemptions()} == {("acme", "tenant")}


def test_the_wait_for_room_inside_the_batch_is_queued_time() -> None:
    """Each takes most of the pool, so they run one after another: each later one was queued while others ran.

    The clock counts the forwards.
    """
    sizes: list[int] = []
    with (
        engine_over(model_of(), num_blocks=12, clock=lambda: float(len(sizes))) as engine,
        forwards(engine, sizes),
    ):
        calls = [Call("acme", prompt_of(20 + n, n), 48 - 20 - n + 1) for n in range(3)]
        calls.append(Call("acme", prompt_of(20, 7), 24, num_beams=1, do_sample=True, seed=1))
        made = sorted(together(engine, calls), key=lambda one: one.queued_s)
        for one in made:
            assert 0 <= one.queued_s <= one.time_to_first_token_s <= one.seconds
        ran = [one.seconds - one.queued_s for one in made]
        assert made[-1].queued_s > sum(ran[:-1]) / 2 and made[0].queued_s < made[-1].queued_s / 2


def test_a_request_that_never_fits_is_refused_and_the_others_end() -> None:
    with engine_over(model_of(), num_blocks=12) as engine:
        calls = [Call("acme", prompt_of(40), 40), Call("acme", prompt_of(8, 1), 12)]
        with begun(engine, calls) as (_, works):
            assert isinstance(works[0].future.exception(LIMIT_S), CapacityError)
            assert works[1].future.result(LIMIT_S).token_ids == calls[1].expected(engine)


def test_another_tenant_within_its_guarantee_is_never_preempted() -> None:
    """A tenant that borrows grows beyond the pool: only its own requests give room."""
    with engine_over(model_of(), num_blocks=40) as engine:
        engine.cache.add_tenant(Tenant("kept", guaranteed_blocks=12))
        batch = engine._batch
        assert batch is not None
        lost: list[str] = []
        preempt = batch._preempt

        def noting(request: Any, reason: Any) -> None:
            lost.append(request.tenant)
            preempt(request, reason)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(batch, "_preempt", noting)
            together(engine, [Call("greedy", prompt_of(8, n), 2) for n in range(4)])
            calls = [Call("kept", prompt_of(20, 50), 28)]
            calls += [Call("greedy", prompt_of(12, n), 30) for n in range(5)]
            made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        assert lost and set(lost) == {"greedy"}


def test_a_borrower_gives_way_to_a_tenant_within_its_guarantee() -> None:
    with engine_over(model_of(), num_blocks=24) as engine:
        engine.cache.add_tenant(Tenant("kept", guaranteed_blocks=12))
        together(engine, [Call("greedy", prompt_of(8, n), 2) for n in range(4)])
        calls = [Call("greedy", prompt_of(12, n), 30) for n in range(3)] + [
            Call("kept", prompt_of(20, 9), 28)
        ]
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]


def test_a_strict_tenant_learns_from_its_own_requests_alone() -> None:
    with engine_over(model_of()) as engine:
        engine.cache.add_tenant(Tenant("strict", guaranteed_blocks=40, mode="strict"))
        together(
            engine, [Call(tenant, prompt_of(8), num) for tenant, num in (("strict", 9), ("a", 3), ("b", 3))]
        )
        room = engine._batch._room  # type: ignore[union-attr]
        assert room._lengths("strict").expected(100) == 9
        assert room._lengths("a").expected(100) == room._lengths("b").expected(100) == 3


def test_the_quantile_of_output_lengths() -> None:
    lengths = OutputLengths()
    assert lengths.expected(500) == 500, "nothing is known yet"
    for size in range(1, 101):
        lengths.add(size)
    assert lengths.expected(500) == 91 and lengths.expected(50) == 50
    for _ in range(256):
        lengths.add(7)
    assert lengths.expected(500) == 7


def test_an_unread_stream_gives_its_room_up_and_goes_on_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that stops reading is idle: its blocks serve another request of its tenant meanwhile."""
    monkeypatch.setattr("radixkv.service.engine_loop.STALLED_AFTER_S", LIMIT_S)
    with engine_over(model_of(), num_blocks=14) as engine:
        taken, loop, seen = threading.Event(), loop_of(engine), list[int]()

        def read_slowly(work: Work[Any]) -> Steps[Generation]:
            work.is_ahead = lambda: len(seen) >= 5 and not taken.is_set()
            return generating(
                engine,
                engine.namespace("acme"),
                prompt_of(20),
                24,
                work.admission(lambda: None),
                eos_token_id=-1,
                on_step=lambda step: seen.append(step[0][0]),
                stop=lambda: work.stopping,
            )

        unread = loop.submit("acme", read_slowly)
        eventually(lambda: loop.num_suspended, "the stream's reader is ahead")
        other = Call("acme", prompt_of(24, 1), 24)
        work = loop.submit("acme", partial(other.run, engine))
        assert work.future.result(LIMIT_S).token_ids == other.expected(engine)
        assert engine.preemptions() == {("acme", "unread"): 1} and not unread.future.done()
        taken.set()
        unread.resume()
        assert unread.future.result(LIMIT_S).token_ids == stock(engine.model, [prompt_of(20)], 24, eos=None)
        loop.close()


def test_what_may_not_start_any_more_ends_before_it_computes() -> None:
    """It waits for room while another request runs. The check comes when it could start, not before."""
    with engine_over(model_of(), num_blocks=12) as engine:
        first, tally, asked = Call("acme", prompt_of(24), 24), Tally(), list[bool]()
        loop, is_revoked = loop_of(engine), threading.Event()

        def may_start() -> None:
            asked.append(is_revoked.is_set())
            if is_revoked.is_set():
                raise PermissionError

        def run(work: Work[Any]) -> Steps[Generation]:
            ns, admission = engine.namespace("acme"), work.admission(may_start)
            prompt = prompt_of(24, 1)
            return generating(engine, ns, prompt, 24, admission, stop=lambda: work.stopping, tally=tally)

        first.mode["on_step"] = lambda _: is_revoked.set()
        works = [loop.submit("acme", partial(first.run, engine)), loop.submit("acme", run)]
        assert isinstance(works[1].future.exception(LIMIT_S), PermissionError)
        assert works[0].future.result(LIMIT_S).token_ids == stock(engine.model, [first.prompt], 24, eos=None)
        assert tally.num_cached == [] and asked == [True]
        loop.close()


def test_a_tenants_unread_requests_give_their_places_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """None of those that run is read, so a further one of the tenant starts all the same, and nothing ends."""
    monkeypatch.setattr("radixkv.engines.hf.batch.NUM_TOGETHER", 2)
    with engine_over(model_of()) as engine:
        taken, loop, seen = threading.Event(), loop_of(engine), list[int]()

        def unread(seed: int, work: Work[Any]) -> Steps[Generation]:
            work.is_ahead = lambda: len(seen) >= 6 and not taken.is_set()
            ns, admission = engine.namespace("acme"), work.admission(lambda: None)
            options = {"on_step": lambda step: seen.append(step[0][0]), "stop": lambda: work.stopping}
            return generating(engine, ns, prompt_of(12, seed), 9, admission, eos_token_id=-1, **options)

        works = [loop.submit("acme", partial(unread, seed)) for seed in range(2)]
        eventually(lambda: loop.num_suspended == 2, "nobody reads")
        other = Call("acme", prompt_of(12, 5), 9)
        work = loop.submit("acme", partial(other.run, engine))
        assert work.future.result(LIMIT_S).token_ids == other.expected(engine)
        assert engine.preemptions() == {("acme", "unread"): 1}
        expected = [stock(engine.model, [prompt_of(12, seed)], 9, eos=None) for seed in range(2)]
        taken.set()
        loop.wake()
        assert [each.future.result(LIMIT_S).token_ids for each in works] == expected
        loop.close()


# --- order


@contextmanager
def starts(engine: HFEngine) -> Iterator[list[Any]]:
    """Tenants and prompts in the order in which they start."""
    order: list[Any] = []
    batch = engine._batch
    assert batch is not None
    real: Callable[..., bool] = batch._start

    def noting(request: Any) -> bool:
        has_started = real(request)
        if has_started:
            order.append((request.tenant, request.prompts[0].ids.tolist()))
        return has_started

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "_start", noting)
        yield order


def started(engine: HFEngine, calls: list[Call]) -> list[Any]:
    """Return tenants and prompts in the order in which they started."""
    with starts(engine) as order:
        together(engine, calls)
    return order


def test_a_patient_request_lets_the_running_ones_of_its_tenant_go_first() -> None:
    with engine_over(model_of(), num_blocks=200) as engine, starts(engine) as order:
        loop, held = loop_of(engine), threading.Event()
        calls = [Call("acme", prompt_of(9 + n, n), 20) for n in range(4)]
        calls.append(Call("globex", prompt_of(8, 9), 20))
        loop.call("first", lambda _: held.wait(LIMIT_S))
        works = [
            loop.submit(call.tenant, partial(call.run, engine), patience_s=PATIENT_S if n in (1, 2, 4) else 0)
            for n, call in enumerate(calls)
        ]
        works[2].hurry()
        held.set()
        made = [work.future.result(LIMIT_S) for work in works]
        loop.close()
    assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
    assert [prompt for _, prompt in order][-1] == calls[1].prompt, "it starts when the others are over"
    assert len(order) == 5


def test_a_router_hears_what_is_still_to_compute() -> None:
    """Tokens that are resident don't count, whether their request waits or has begun."""
    prompt, told = prompt_of(64), list[tuple[int, int | None]]()
    with engine_over(model_of(), chunk_tokens=16) as engine:
        assert engine.prefill_tokens() == 0
        name = engine.namespace("acme")
        engine.prefill(name, prompt[:20])
        engine.prefill(
            name, prompt, on_chunk=lambda done, total: told.append((done, engine.prefill_tokens()))
        )
        assert told == [(36, 28), (52, 12), (64, 0)]
        assert engine.prefill_tokens() == 0
        batch = engine._batch
        assert batch is not None
        queue = batch._queue
        for at in (64, 40):
            waiting = queue.add("acme", tokens=80, missing=1 - at / 80)
            assert engine.prefill_tokens() == engine.prefill_tokens(0.0) == 80 - at
            cold = queue.add("acme", tokens=80)
            assert (engine.prefill_tokens(), engine.prefill_tokens(0.0)) == (160 - at, 80 - at)
            queue.remove(cold)
            queue.remove(waiting)


def test_requests_with_a_resident_prompt_start_first() -> None:
    with engine_over(model_of(), num_blocks=24) as engine:
        warm = prompt_of(40, 7)
        together(engine, [Call("acme", prompt_of(8, n), 20) for n in range(2)])
        engine.prefill(engine.namespace("acme"), warm)
        first, cold = Call("acme", prompt_of(40, 1), 20), Call("acme", prompt_of(40, 2), 20)
        order = started(engine, [first, cold, Call("acme", warm, 20)])
        assert [prompt for _, prompt in order] == [warm, first.prompt, cold.prompt]


def test_a_flood_doesnt_hold_up_another_tenant() -> None:
    with engine_over(model_of(), num_blocks=60, chunk_tokens=16) as engine:
        flood = [Call("flood", prompt_of(60, n), 6) for n in range(10)]
        order = started(engine, [*flood, Call("calm", prompt_of(20, 99), 6)])
        place = [tenant for tenant, _ in order].index("calm")
        assert place <= 2


def test_prompts_of_others_dont_hold_a_strict_tenants_prompt_up() -> None:
    """Its four chunks and two tokens take few more steps, though all budgets of prompts are asked for by others."""
    with engine_over(model_of(), num_blocks=800, chunk_tokens=64) as engine:
        engine.cache.add_tenant(Tenant("strict", guaranteed_blocks=100, mode="strict"))
        flood = [Call(f"t{n % 4}", prompt_of(450, n), 3) for n in range(8)]
        own = Call("strict", prompt_of(4 * 64, 99), 2)
        ends = list[int]()
        with forwards(engine) as sizes:
            own.mode["on_step"] = lambda _: ends.append(len(sizes))
            made = together(engine, [*flood, own])
        assert made[-1].token_ids == stock(engine.model, [own.prompt], 2, eos=None)
        assert len(ends) == 2 and ends[-1] <= 4 + 1 + 1 + 3
        assert max(sizes) <= 64 + MAX_ROWS + 8
        assert [one.token_ids for one in made[:-1]] == [call.expected(engine) for call in flood]


def test_a_large_request_is_not_passed_over_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has room only if the others end. After some starts before it, no other request of a burst tenant starts."""
    monkeypatch.setattr("radixkv.engines.hf.batch._MAX_PASSED", 3)
    with engine_over(model_of(), num_blocks=30) as engine:
        small = [Call(f"t{n}", prompt_of(8, n), 12) for n in range(14)]
        order = started(engine, [*small[:2], Call("large", prompt_of(80, 50), 30), *small[2:]])
        assert [tenant for tenant, _ in order].index("large") <= 2 + 3 + 1


# --- random requests


@pytest.mark.slow
@pytest.mark.parametrize("seed", seeds(2, 6))
def test_random_requests_in_a_small_pool(seed: int) -> None:
    """Tenants with guarantees and limits, shared prefixes, all modes: the tokens of each alone, and nothing is left."""
    draw = torch.Generator().manual_seed(seed)

    def pick(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=draw))

    with engine_over(model_of(), num_blocks=70, chunk_tokens=pick(3, 40), block_size=pick(1, 6)) as engine:
        engine.cache.add_tenant(Tenant("t0", guaranteed_blocks=25, mode="strict"))
        engine.cache.add_tenant(Tenant("t1", guaranteed_blocks=10))
        size = engine.cache.config.block_size
        calls = []
        for n in range(20):
            tenant, head = f"t{pick(0, 4)}", prompt_of(12, pick(0, 2))[: pick(0, 12)]
            prompt = [*head, *prompt_of(pick(1, 8), n)]
            most = (25 if tenant == "t0" else 40) * size - len(prompt)
            mode = MODES[pick(0, 2)]  # several rows may need more than a strict tenant has
            calls.append(Call(tenant, prompt, min(pick(1, 40), max(most, 1)), **mode))
        made = together(engine, calls)
        assert [one.token_ids for one in made] == [call.expected(engine) for call in calls]
        audit.check(engine.cache)
