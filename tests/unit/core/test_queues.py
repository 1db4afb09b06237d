from __future__ import annotations

import pytest

from cache_svc.blocks.table import BlockTable
from scheduler_svc.core.params import QueuePolicy, SeqId, SequenceSpec
from scheduler_svc.core.queue_orders import OLDEST_TURN, Fifo, QueueOrder, ResponseRatio
from scheduler_svc.core.queues import WaitingQueue
from scheduler_svc.core.sequence import Sequence


def seq(number: int, length: int = 10, arrival: float = 0.0, priority: int = 0) -> Sequence:
    return Sequence(SequenceSpec(SeqId(number), [1] * length, 4, arrival=arrival), priority=priority)


def pop_all(queue: QueueOrder | WaitingQueue, now: float = 100.0) -> list[int]:
    ids = []
    while (popped := queue.pop(now)) is not None:
        queue.admitted(popped)
        ids.append(int(popped.seq_id))
    return ids


def admit_next(queue: QueueOrder | WaitingQueue) -> int:
    popped = queue.pop(1000.0)
    assert popped is not None
    queue.admitted(popped)
    return int(popped.seq_id)


def filled(policy: QueuePolicy, *sequences: Sequence) -> WaitingQueue:
    queue = WaitingQueue(policy)
    for sequence in sequences:
        queue.push(sequence)
    return queue


def test_fcfs_ignores_length() -> None:
    assert pop_all(filled(QueuePolicy.FCFS, seq(1, 900), seq(2, 1), seq(3, 50))) == [1, 2, 3]


@pytest.mark.parametrize("policy", [QueuePolicy.PRIORITY, QueuePolicy.LENGTH_AWARE])
def test_higher_priorities_go_first_and_equal_ones_in_order_of_arrival(policy: QueuePolicy) -> None:
    queue = filled(policy, seq(1), seq(2, priority=2), seq(3, priority=-1), seq(4), seq(5, priority=2))
    assert queue.top_priority == 2
    assert pop_all(queue) == [2, 5, 1, 4, 3]
    assert queue.top_priority is None


def test_of_equally_long_waits_the_shortest_goes_first() -> None:
    queue = filled(QueuePolicy.LENGTH_AWARE, seq(1, 1000), seq(2, 100), seq(3, 2), seq(4, 300))
    assert pop_all(queue, now=0.0) == [3, 2, 4, 1]


def test_a_ratio_of_wait_to_length_decides() -> None:
    queue = filled(QueuePolicy.LENGTH_AWARE, seq(1, 1000, arrival=0.0), seq(2, 100, arrival=91.0))
    assert pop_all(queue, now=100.0) == [1, 2], "100 / 1000 against 9 / 100"
    queue = filled(QueuePolicy.LENGTH_AWARE, seq(1, 1000, arrival=0.0), seq(2, 100, arrival=89.0))
    assert pop_all(queue, now=100.0) == [2, 1], "100 / 1000 against 11 / 100"


def test_the_oldest_gets_every_eighth_admission_whatever_the_ratios() -> None:
    queue = ResponseRatio()
    queue.push(seq(0, 100_000, arrival=0.0))
    for number in range(1, 40):
        queue.push(seq(number, 1, arrival=1.0))
    queue.push(seq(40, 100_000, arrival=0.5))
    order = pop_all(queue, now=1000.0)
    assert (order.index(0), order.index(40)) == (7, 15)


def test_the_oldest_is_who_came_first_whatever_its_number() -> None:
    queue = ResponseRatio()
    for number in range(10):
        queue.push(seq(number, 1, arrival=1.0))
    queue.push(seq(90, 50_000, arrival=0.5))
    queue.push(seq(91, 100_000, arrival=0.0))
    assert pop_all(queue, now=10.0)[OLDEST_TURN - 1] == 91


def test_the_oldest_keeps_its_turn_when_one_in_front_goes_first() -> None:
    queue = filled(QueuePolicy.LENGTH_AWARE, seq(0, 100_000), *(seq(number, 1, arrival=1.0) for number in range(1, 40)))
    for _ in range(OLDEST_TURN - 1):
        admit_next(queue)
    preempted = seq(50, 10, arrival=2.0)
    preempted.in_front = True
    queue.push(preempted)
    assert [admit_next(queue), admit_next(queue)] == [50, 0]


def test_who_is_admitted_while_nobody_else_waits_brings_no_turn_nearer() -> None:
    queue = ResponseRatio()
    for number in range(3 * OLDEST_TURN):
        queue.push(seq(number, 10, arrival=5.0))
        assert admit_next(queue) == number
    queue.push(seq(100, 100_000, arrival=6.0))
    queue.push(seq(101, 1, arrival=7.0))
    assert admit_next(queue) == 101


def test_each_class_gives_its_oldest_a_turn() -> None:
    long = seq(0, 100_000, arrival=0.0, priority=3)
    queue = filled(QueuePolicy.LENGTH_AWARE, long, *(seq(n, 1, arrival=1.0, priority=3) for n in range(1, 40)))
    assert pop_all(queue, now=1000.0).index(0) == OLDEST_TURN - 1


def test_who_comes_from_a_clock_that_is_ahead_waits_its_turn_like_others() -> None:
    queue = ResponseRatio()
    queue.push(seq(1, 1, arrival=1000.0))
    queue.push(seq(2, 500, arrival=50.0))
    assert pop_all(queue, now=100.0) == [2, 1]


def test_a_pop_that_is_put_back_does_not_count_as_an_admission() -> None:
    queue = ResponseRatio()
    queue.push(seq(0, 100_000, arrival=0.0))
    for number in range(1, 4):
        queue.push(seq(number, 1, arrival=1.0))
    for _ in range(3 * OLDEST_TURN):
        popped = queue.pop(1000.0)
        assert popped is not None
        assert popped.seq_id == 1
        queue.put_back(popped)


@pytest.mark.parametrize("policy", QueuePolicy)
def test_putting_back_restores_the_queue(policy: QueuePolicy) -> None:
    sequences = [seq(number, 1 + number * 37 % 90, number * 0.1, number % 3) for number in range(30)]
    expected = pop_all(filled(policy, *sequences))
    queue = filled(policy, *sequences)
    queue.put_back([sequence for _ in range(12) if (sequence := queue.pop(100.0)) is not None])
    assert len(queue) == 30
    assert pop_all(queue) == expected


@pytest.mark.parametrize("policy", QueuePolicy)
def test_those_in_front_go_first_in_the_order_in_which_they_came_there(policy: QueuePolicy) -> None:
    queue = filled(policy, seq(1, 1), seq(2, 1))
    for number, arrival in ((5, 3.0), (4, 2.0), (6, 4.0)):
        late = seq(number, 500, arrival)
        late.in_front = True
        queue.push(late)
    assert pop_all(queue) == [5, 4, 6, 1, 2]


@pytest.mark.parametrize("policy", QueuePolicy)
def test_removal_from_anywhere_keeps_the_rest_in_order(policy: QueuePolicy) -> None:
    sequences = [seq(number, 1 + number * 37 % 90, 0.0, number % 3) for number in range(20)]
    sequences[7].in_front = sequences[8].in_front = True
    expected = pop_all(filled(policy, *sequences))
    for gone in sequences:
        queue = filled(policy, *sequences)
        queue.remove(gone)
        assert pop_all(queue) == [number for number in expected if number != gone.seq_id]
        assert (len(queue), queue.num_tokens) == (0, 0)
        with pytest.raises(KeyError):
            queue.remove(gone)


def test_a_removed_one_that_is_not_in_front_is_not_mistaken_for_a_neighbour() -> None:
    queue = filled(QueuePolicy.FCFS, seq(1))
    stranger = seq(2)
    stranger.in_front = True
    with pytest.raises(KeyError):
        queue.remove(stranger)


def test_who_has_left_the_front_is_not_mistaken_for_who_is_there() -> None:
    first, second = seq(1), seq(2)
    first.in_front = second.in_front = True
    queue = filled(QueuePolicy.FCFS, first, second)
    assert queue.pop(0.0) is first
    with pytest.raises(KeyError):
        queue.remove(first)
    assert pop_all(queue) == [2]


def test_priorities_leave_nothing_behind() -> None:
    queue = filled(QueuePolicy.LENGTH_AWARE, *(seq(number, priority=number) for number in range(500)))
    pop_all(queue)
    assert queue._order._classes == {}
    assert queue._order._ranks == []


def test_a_pick_looks_at_one_head_per_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = ResponseRatio()
    for number in range(5000):
        queue.push(seq(number, 1 + number % 3000))
    looked_at = 0
    head = Fifo.head

    def counting_head(self: Fifo) -> Sequence:
        nonlocal looked_at
        looked_at += 1
        return head(self)

    monkeypatch.setattr(Fifo, "head", counting_head)
    assert queue.pop(5.0) is not None
    assert looked_at <= 12


@pytest.mark.parametrize("policy", QueuePolicy)
def test_those_who_come_to_the_front_together_keep_their_order(policy: QueuePolicy) -> None:
    queue = filled(policy, seq(1, 9), seq(2, 9), seq(3, 9))
    popped = [sequence for _ in range(3) if (sequence := queue.pop(0.0)) is not None]
    for sequence in popped[:2]:
        sequence.in_front = True
    queue.put_back(popped)
    assert pop_all(queue) == [1, 2, 3]


def test_cached_tokens_count_towards_what_the_queue_holds() -> None:
    queue = WaitingQueue(QueuePolicy.LENGTH_AWARE)
    sequence = seq(1, 500)
    sequence.service = 1
    queue.push(sequence)
    assert (queue.num_tokens, queue.num_known_tokens) == (1, 500)
    sequence.token_ids.append(7)  # a row that was in flight brings a token meanwhile
    queue.remove(sequence)
    assert (queue.num_tokens, queue.num_known_tokens) == (0, 0)


def test_who_is_found_to_have_less_to_compute_moves_to_where_it_belongs() -> None:
    sequences = [seq(1, 1000), seq(2, 100), seq(3, 1010), seq(4, 900)]
    queue = filled(QueuePolicy.LENGTH_AWARE, *sequences)
    queue.shorten(sequences[2], 3)
    queue.shorten(sequences[0], 800)
    assert queue.num_tokens == 800 + 100 + 3 + 900
    assert pop_all(queue, now=0.0) == [3, 2, 1, 4], "the first keeps its place before the last in the bucket they share"
    assert queue.num_tokens == 0


def test_who_is_found_to_be_short_goes_behind_those_who_were_known_to_be() -> None:
    sequences = [seq(1, 1000), seq(2, 100), seq(3, 90)]
    queue = filled(QueuePolicy.LENGTH_AWARE, *sequences)
    queue.shorten(sequences[0], 100)
    assert pop_all(queue, now=0.0) == [2, 3, 1]


@pytest.mark.parametrize("policy", [QueuePolicy.FCFS, QueuePolicy.PRIORITY])
def test_an_order_that_does_not_look_at_lengths_keeps_it_when_one_is_shorter(policy: QueuePolicy) -> None:
    sequences = [seq(1, 1000), seq(2, 100), seq(3, 1010)]
    queue = filled(policy, *sequences)
    queue.shorten(sequences[2], 1)
    assert (pop_all(queue), queue.num_tokens) == ([1, 2, 3], 0)


def test_who_is_in_front_stays_there_when_it_is_shorter() -> None:
    sequences = [seq(1, 50), seq(2, 1000)]
    sequences[1].in_front = True
    queue = filled(QueuePolicy.LENGTH_AWARE, *sequences)
    queue.shorten(sequences[1], 1)
    queue.remove(sequences[1])
    assert (pop_all(queue), queue.num_tokens) == ([1], 0)


def test_who_came_to_the_front_earlier_is_ahead_also_after_it_was_looked_at_and_put_back() -> None:
    first, second, third = seq(1), seq(2), seq(3)
    first.in_front = second.in_front = third.in_front = True
    queue = filled(QueuePolicy.FCFS, first, second)
    popped = [sequence for _ in range(2) if (sequence := queue.pop(0.0)) is not None]
    queue.push(third)  # it made room meanwhile
    queue.put_back(popped)
    assert pop_all(queue) == [1, 2, 3]


def test_who_has_run_since_comes_to_the_front_behind_those_who_wait_there() -> None:
    first, second = seq(1), seq(2)
    first.in_front = second.in_front = True
    queue = filled(QueuePolicy.FCFS, first, second)
    assert queue.pop(0.0) is first
    first.start(0, BlockTable(4), 0, 0, 0.0)
    first.requeue()
    queue.push(first)
    assert pop_all(queue) == [2, 1]


def test_who_was_passed_too_often_comes_to_the_front_behind_who_made_room_meanwhile() -> None:
    passed, preempted = seq(1), seq(2)
    queue = filled(QueuePolicy.FCFS, passed)
    assert queue.pop(0.0) is passed
    preempted.in_front = True
    queue.push(preempted)
    passed.in_front = True
    queue.put_back([passed])
    assert pop_all(queue) == [2, 1]
