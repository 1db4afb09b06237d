"""Cost of the wire: encoding and decoding plans and results, and the way there and back over ipc.

    python bench/bench_wire.py [--json FILE]

Times are medians of process CPU time per operation (microseconds), so neighbours on the machine disturb little; the
round trip is wall time. Budget (DESIGN 9): encode + decode of a 256-row plan in 20 us.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from pagemill.columns import pack, unpack
from pagemill.engine.v1 import executor_pb2 as ex
from pagemill.framing import Channel
from pagemill.links import SendOutcome
from pagemill.zmq_links import EXECUTOR_BOUND, Waiter, ZmqHub, ZmqPeer, new_identity
from scheduler_svc.core.params import SamplingSpec
from scheduler_svc.core.plan import Admit, StepPlan
from scheduler_svc.executor_codec import decode_result, encode_plan
from scheduler_svc.gateway_codec import encode_tokens

ROWS = 256


def cpu_us(action: Callable[[], object], number: int = 500, repeat: int = 15) -> float:
    """Median over `repeat` rounds of CPU microseconds per call."""
    rounds = []
    for _ in range(repeat):
        begin = time.process_time_ns()
        for _ in range(number):
            action()
        rounds.append((time.process_time_ns() - begin) / number / 1000)
    return round(statistics.median(rounds), 2)


def plans() -> dict[str, StepPlan]:
    lanes, some = list(range(ROWS)), list(range(16))
    admit = Admit(3, 1, list(range(8192)), 8192, 0, list(range(512)), SamplingSpec(), frozenset({2}))
    return {
        "rows, 16 appends": StepPlan(10**6, row_lanes=lanes, append_lanes=some, append_block_ids=some),
        "rows and counts, 16 appends": StepPlan(
            10**6, row_lanes=lanes, row_num_tokens=[1] * ROWS, append_lanes=some, append_block_ids=some
        ),
        "repeat, 16 appends": StepPlan(10**6, repeat_decode=True, append_lanes=some, append_block_ids=some),
        "admit of 8,192 tokens": StepPlan(10**6, admit=[admit], row_lanes=[3], row_num_tokens=[256]),
    }


def decode_plan(data: bytes) -> None:
    """As an executor without numpy would: every column to a list."""
    plan = ex.StepPlan.FromString(data)
    for column in (plan.row_lanes, plan.row_num_tokens, plan.append_lanes, plan.append_block_ids):
        unpack(column)
    for admit in plan.admit:
        unpack(admit.token_ids)
        unpack(admit.block_ids)


def codec_costs() -> dict[str, object]:
    found: dict[str, object] = {}
    for name, plan in plans().items():
        data = encode_plan(plan).SerializeToString()
        encode_us = cpu_us(lambda plan=plan: encode_plan(plan).SerializeToString())  # type: ignore[misc]
        decode_us = cpu_us(lambda data=data: decode_plan(data))  # type: ignore[misc]
        total = round(encode_us + decode_us, 2)
        found[f"plan: {name}"] = {"bytes": len(data), "encode_us": encode_us, "decode_us": decode_us, "sum_us": total}
    result = ex.StepResult(step_id=10**6, status=ex.STEP_STATUS_OK, token_ids=pack(list(range(ROWS))))
    data = result.SerializeToString()
    ids = list(range(ROWS))
    encode_us = cpu_us(
        lambda: ex.StepResult(step_id=1, status=ex.STEP_STATUS_OK, token_ids=pack(ids)).SerializeToString()
    )
    decode_us = cpu_us(lambda: decode_result(ex.StepResult.FromString(data), 50_000, 1_000))
    found["result: 256 rows, checked"] = {"bytes": len(data), "encode_us": encode_us, "decode_us": decode_us}
    columns = list(range(ROWS))
    tokens_us = cpu_us(lambda: encode_tokens(columns, None, columns, columns).SerializeToString())
    found["token batch: 256 streams"] = {"encode_us": tokens_us}
    return found


def round_trip() -> dict[str, float]:
    """A steady plan there and a 256-row result back, through envelopes, over ipc; wall microseconds."""
    folder = tempfile.TemporaryDirectory(prefix="pm-")
    hub = ZmqHub(f"ipc://{folder.name}/e.sock", role="executor", bound=EXECUTOR_BOUND)
    identity = new_identity("executor", "bench")
    result = ex.StepResult(step_id=1, status=ex.STEP_STATUS_OK, token_ids=pack(list(range(ROWS))))
    stop = threading.Event()

    def answer() -> None:
        peer = ZmqPeer(hub.endpoint, identity)
        channel: Channel[ex.ExecutorEnvelope] = Channel(ex.ExecutorEnvelope)
        while peer.send(channel.pack(result=result)) is not SendOutcome.SENT:
            time.sleep(0.001)
        while not stop.is_set():
            frame = peer.recv(0.1)
            if frame is not None and channel.unpack(frame) is not None:
                peer.send(channel.pack(result=result))
        peer.close()

    thread = threading.Thread(target=answer)
    thread.start()
    waiter, channel, times = Waiter([hub]), Channel(ex.ExecutorEnvelope), []
    plan = encode_plan(plans()["repeat, 16 appends"])
    begin = 0
    for turn in range(2_200):
        while (item := hub.recv()) is None:
            waiter.wait(1.0)
        channel.unpack(item[1])
        now = time.perf_counter_ns()
        if turn > 200:
            times.append((now - begin) / 1000)
        begin = time.perf_counter_ns()
        hub.send(identity, channel.pack(plan=plan))
    stop.set()
    thread.join()
    hub.close()
    folder.cleanup()
    cuts = statistics.quantiles(times, n=100)
    return {"p50_us": round(cuts[49], 1), "p99_us": round(cuts[98], 1)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="also write the numbers here")
    args = parser.parse_args()
    found = codec_costs() | {"round trip over ipc, one process": round_trip()}
    for name, numbers in found.items():
        print(f"{name:36} {numbers}")
    if args.json:
        with open(args.json, "w") as file:
            json.dump(found, file, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
