"""The description of what a rank does, from its open events."""

from __future__ import annotations

import bdb
import sys
import threading
from collections.abc import Callable
from types import CodeType
from typing import Any

import torch

from megalite.distributed.axis import (
    CHECKPOINT,
    DEVICE,
    PROFILER,
    STORE_BARRIER,
    EventStack,
    Wait,
    observing,
)
from megalite.distributed.collectives import Pending
from megalite.distributed.topology import Topology
from megalite.pipeline.schedules import Action, ActionKind
from megalite.train.callbacks.hang_report import (
    awaited_ranks,
    describe,
    in_debugger,
    main_stack,
    may_take_any_time,
)

RANKS_OF = {"pp": (0, 2), "dp": (0,), "tp": (0, 1), "world": (0, 1, 2, 3)}
BACKWARD = Action(ActionKind.BACKWARD, 3, 1)


def from_another_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join()
    return results[0]


def test_the_description_goes_from_the_innermost_event_outward() -> None:
    assert describe(["forward-backward", Action(ActionKind.FORWARD, 2), "reading data from sample 8 on"]) == (
        "reading data from sample 8 on, in forward of microbatch 2"
    )
    assert describe(["forward-backward", BACKWARD, Wait("tp", "all-reduce")]) == (
        "all-reduce over tp, in backward of microbatch 3 of chunk 1"
    )
    assert describe(["eval-time", Wait("dp", "all-reduce", "the loss")]) == (
        "all-reduce of the loss over dp, in eval-time"
    )
    assert describe(["forward-backward"]) == "forward-backward"
    assert describe([]) == "in no event that ranks post"


def test_a_message_names_its_microbatch_and_the_rank_at_its_other_end() -> None:
    receive = Wait("pp", "backward-recv", BACKWARD, 2)
    assert describe([BACKWARD, receive]) == (
        "backward-recv of microbatch 3 of chunk 1 from rank 2 over pp, in backward of microbatch 3 of chunk 1"
    )
    assert awaited_ranks([BACKWARD, receive], RANKS_OF) == (2,)
    send = Wait("pp", "forward-send", Action(ActionKind.FORWARD, 0), 2)
    assert describe([send]) == "forward-send of microbatch 0 to rank 2 over pp"


def test_only_the_innermost_event_is_waited_in() -> None:
    assert awaited_ranks([BACKWARD, Wait("tp", "all-reduce")], RANKS_OF) == (0, 1)
    assert awaited_ranks([Wait("world", STORE_BARRIER)], RANKS_OF) == (0, 1, 2, 3)
    assert awaited_ranks([BACKWARD, DEVICE], RANKS_OF) == ()
    assert awaited_ranks([BACKWARD], RANKS_OF) is None
    assert awaited_ranks([], RANKS_OF) is None


def test_checkpoints_and_profiles_may_take_any_time() -> None:
    assert may_take_any_time(["save-checkpoint", CHECKPOINT])
    assert may_take_any_time([PROFILER])
    assert not may_take_any_time([BACKWARD, "reading data from sample 0 on"])
    assert not may_take_any_time([])


def test_a_collective_for_a_rank_that_saves_may_not_take_any_time() -> None:
    assert not may_take_any_time([CHECKPOINT, Wait("world", "all-reduce", "a save's result")])
    assert may_take_any_time([CHECKPOINT, Wait("world", STORE_BARRIER)])


def test_the_debugger_may_take_any_time() -> None:
    def in_file(file: str) -> CodeType:
        return compile("found = from_another_thread(in_debugger)", file, "exec")

    for file, is_debugger in ((bdb.__file__, True), (__file__, False)):
        scope: dict[str, Any] = {"from_another_thread": from_another_thread, "in_debugger": in_debugger}
        exec(in_file(file), scope)
        assert scope["found"] is is_debugger or sys.gettrace() is not None


def test_an_error_ends_the_events_that_it_leaves() -> None:
    events = EventStack()
    with events.during("outer"):
        events.begins("inner")
        events.begins(Wait("dp", "all-reduce"))
        events.ends("inner")  # as `during` does when an error passes
        assert events.now() == ("outer",)
    assert events.now() == ()


def test_store_barriers_and_collectives_of_all_ranks_are_posted(one_rank: Topology) -> None:
    waits: list[Wait] = []

    class Notes:
        def begins(self, what: Wait) -> None:
            waits.append(what)

        def ends(self, what: Wait) -> None:
            pass

    with observing(one_rank.observers, Notes()), one_rank.agreed():
        assert waits == []
    assert waits == [Wait("world", STORE_BARRIER), Wait("world", "all-gather", "errors")]
    assert describe(waits[:1]) == "store barrier over all ranks"


def test_a_collective_on_its_way_is_posted_where_it_is_waited_for(one_rank: Topology) -> None:
    found = []

    class Work:
        def wait(self) -> None:
            found.append(describe(one_rank.events.now()))

    with observing(one_rank.observers, one_rank.events):
        Pending(torch.zeros(1), Work(), one_rank.tp, "all-gather").wait()  # type: ignore[arg-type]
    assert found == ["all-gather over tp"]
    assert one_rank.events.now() == ()


def test_the_main_threads_stack_is_found_from_another() -> None:
    assert "test_the_main_threads_stack_is_found_from_another" in from_another_thread(main_stack)
