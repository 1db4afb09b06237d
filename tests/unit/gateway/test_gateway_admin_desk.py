"""Questions to the scheduler: each has one answer or one error, in time, and leaves nothing."""

from __future__ import annotations

import asyncio

import pytest

from pagemill.engine.v1 import frontend_pb2 as wire
from pagemill.errors import PagemillError, Reason
from scheduler_svc.gateway.admin_desk import AdminDesk

CHECK = wire.ADMIN_OPERATION_CHECK_INVARIANTS


class Link:
    def __init__(self) -> None:
        self.sent: list[wire.AdminRequest] = []
        self.takes = True

    def __call__(self, question: wire.AdminRequest) -> bool:
        if self.takes:
            self.sent.append(question)
        return self.takes


async def test_answers_find_their_questions_in_any_order() -> None:
    link = Link()
    desk = AdminDesk(link)
    asked = [asyncio.create_task(desk.ask(CHECK)) for _ in range(3)]
    await asyncio.sleep(0)
    assert len({question.id for question in link.sent}) == 3
    for question in reversed(link.sent):
        desk.answered(wire.AdminReply(id=question.id, num_flushed_blocks=question.id))
    replies = await asyncio.gather(*asked)
    assert [reply.num_flushed_blocks for reply in replies] == [question.id for question in link.sent]
    assert len(desk) == 0


async def test_an_answer_that_does_not_come_in_time_is_an_error_and_late_ones_are_dropped() -> None:
    link = Link()
    desk = AdminDesk(link, timeout_s=0.02)
    with pytest.raises(PagemillError) as caught:
        await desk.ask(CHECK)
    assert caught.value.reason is Reason.NOT_READY
    assert len(desk) == 0
    desk.answered(wire.AdminReply(id=link.sent[0].id))
    desk.answered(wire.AdminReply(id=999))


async def test_without_a_link_there_is_no_question() -> None:
    link = Link()
    link.takes = False
    desk = AdminDesk(link)
    with pytest.raises(PagemillError) as caught:
        await desk.ask(CHECK)
    assert caught.value.reason is Reason.NOT_READY
    assert len(desk) == 0


async def test_questions_are_bounded() -> None:
    desk = AdminDesk(Link())
    asked = [asyncio.create_task(desk.ask(CHECK)) for _ in range(16)]
    await asyncio.sleep(0)
    with pytest.raises(PagemillError) as caught:
        await desk.ask(CHECK)
    assert caught.value.reason is Reason.QUEUE_FULL
    desk.lose_session()
    desk.lose_session()
    outcomes = await asyncio.gather(*asked, return_exceptions=True)
    assert all(isinstance(e, PagemillError) and e.reason is Reason.NOT_READY for e in outcomes)
    assert len(desk) == 0
