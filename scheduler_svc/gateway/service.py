"""The public service: each method's life from request to last message.

Generate: check → encode → submit → wait for admission → initial metadata → Accepted → deltas → Finished. Tokens are
processed (text, stop strings) as they come from the scheduler, whatever the client does; a writer takes all that is
pending as one message, so a slow client costs itself bigger messages and nobody else anything.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import dataclass
from typing import Any

from pagemill import columns
from pagemill.engine.v1.sampling_pb2 import Sampling
from pagemill.errors import PagemillError, Reason, invalid
from pagemill.model_files import ModelInfo
from pagemill.v1 import inference_pb2 as pb
from pagemill.v1 import inference_pb2_grpc
from scheduler_svc.gateway import validation
from scheduler_svc.gateway.limits import ModelLimits
from scheduler_svc.gateway.messages import OutputClock, delta, finished, num_cached
from scheduler_svc.gateway.metrics import GatewayMetrics
from scheduler_svc.gateway.output import Ending, EndKind, Output, StopRules
from scheduler_svc.gateway.prompts import PromptEncoder
from scheduler_svc.gateway.registry import Call, Registry
from scheduler_svc.gateway.scheduler_client import SchedulerClient
from scheduler_svc.gateway.status import CallOverError
from scheduler_svc.gateway.streams import LiveStream, Replay, cache_salt
from scheduler_svc.gateway.tokenizer import TokenizerPool

_BILL_WAIT_S = 1.0
"""How long an output that ended here waits for the scheduler's last word, which carries the bill."""
_TENANT = ""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model as clients know it."""

    name: str
    info: ModelInfo
    max_model_len: int
    """The operator's or the model's limit; an executor may have a lower one."""


class InferenceService(inference_pb2_grpc.InferenceServiceServicer):
    """`pagemill.v1.InferenceService`."""

    def __init__(
        self,
        model: ServedModel,
        *,
        pool: TokenizerPool,
        prompts: PromptEncoder,
        scheduler: SchedulerClient,
        registry: Registry,
        metrics: GatewayMetrics,
    ) -> None:
        self._model = model
        self._pool = pool
        self._prompts = prompts
        self._scheduler = scheduler
        self._registry = registry
        self._metrics = metrics

    def limits(self) -> ModelLimits:
        """What the model allows with the executor that is connected now."""
        most = self._model.max_model_len
        theirs = self._scheduler.status.max_model_len
        return ModelLimits(self._model.info.vocab_size, min(most, theirs) if theirs else most)

    # ---- Generate ----

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:  # noqa: N802
        """Stream one generation."""
        arrival = time.monotonic()
        outcome = "cancelled"  # unless told otherwise below: the client went away
        try:
            outcome = await self._generate(request, context, arrival)
        except PagemillError as error:
            outcome = error.reason.value
            raise
        except (asyncio.CancelledError, CallOverError):
            remaining = context.time_remaining()
            if remaining is not None and remaining <= 0:
                outcome = Reason.DEADLINE_EXCEEDED.value
            raise
        except Exception:
            outcome = Reason.INTERNAL.value
            raise
        finally:
            self._metrics.ended(outcome)

    async def _generate(self, request: pb.GenerateRequest, context: Any, arrival: float) -> str:
        self._registry.check_open()
        self._check_model(request.model)
        remaining = context.time_remaining()
        deadline = None if remaining is None else arrival + remaining
        _check_deadline(deadline)
        generation = validation.check_generate(request, self.limits())
        request_id = generation.request_id or f"gen-{secrets.token_hex(12)}"
        await self._registry.wait_for_id(_TENANT, request_id)
        with self._registry.enter(_TENANT, request_id) as call:
            prompt_ids = await self._encode(request)
            max_tokens = validation.resolve_max_tokens(generation, len(prompt_ids), self.limits().max_model_len)
            _check_deadline(deadline)
            stream = self._new_stream(
                generation, request_id, prompt_ids, max_tokens=max_tokens, arrival=arrival, deadline=deadline
            )
            try:
                await self._admit(stream, call)
                await self._write_all(stream, call, generation, context)
            finally:
                self._scheduler.release(stream)
        assert stream.output.ending is not None
        return stream.output.ending.kind.value

    def _check_model(self, name: str) -> None:
        if name and name != self._model.name:
            raise PagemillError(Reason.MODEL_NOT_FOUND, f"no such model; this server has {self._model.name}")

    async def _encode(self, request: pb.GenerateRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            # First the length: as a list of Python's, ids take up to twenty times what they do in the message.
            validation.room_behind(len(request.token_ids.ids), self.limits().max_model_len)
            return list(request.token_ids.ids)
        ids = await (self._prompts.text(request.text) if kind == "text" else self._prompts.chat(request.chat))
        if not ids:
            raise invalid(str(kind), "comes to no token")
        return ids

    def _new_stream(
        self,
        generation: validation.Generation,
        request_id: str,
        prompt_ids: list[int],
        *,
        max_tokens: int,
        arrival: float,
        deadline: float | None,
    ) -> LiveStream:
        eos = () if generation.ignore_eos else self._model.info.eos_token_ids
        own = frozenset(generation.stop_token_ids)
        stop_ids = own.union(eos)
        seed = generation.seed if generation.seed is not None else secrets.randbits(63)
        replay = Replay(
            request_id=request_id,
            tenant=_TENANT,
            priority=generation.priority,
            prompt_ids=columns.pack(prompt_ids),
            num_prompt_tokens=len(prompt_ids),
            sampling=Sampling(
                temperature=generation.temperature,
                top_p=generation.top_p,
                top_k=generation.top_k,
                min_p=generation.min_p,
                seed=seed,
                min_tokens=generation.min_tokens,
                stop_token_ids=columns.pack(sorted(stop_ids)),
            ),
            max_tokens=max_tokens,
            arrival=arrival,
            deadline=deadline,
            max_queue_ms=generation.max_queue_ms,
            cache_salt=cache_salt(_TENANT, generation.cache_salt),
        )
        tokenizer = self._pool.tokenizer
        rules = StopRules(max_tokens, generation.min_tokens, stop_ids, own, generation.stop, generation.include_stop)
        output = Output(tokenizer.new_detokenizer(), rules, tokenizer.literal)
        return LiveStream(self._scheduler.table.new_id(), replay, output)

    async def _admit(self, stream: LiveStream, call: Call) -> None:
        """Return when the scheduler has queued the stream (or another call has cancelled it)."""
        call.attach(stream)
        if stream.cancel_requested:
            stream.output.end(Ending(EndKind.CANCELLED))
            return
        self._scheduler.submit(stream)
        while not (stream.admitted or stream.is_over):
            await self._next_news(stream)
        if stream.error is not None and not stream.admitted:
            raise stream.error

    async def _next_news(self, stream: LiveStream) -> None:
        """Wait for news; past the deadline the call ends here even if the scheduler is silent."""
        deadline = stream.replay.deadline
        if deadline is None:
            await stream.wait()
        else:
            try:
                async with asyncio.timeout_at(_loop_time(deadline)):
                    await stream.wait()
            except TimeoutError:
                stream.fail(PagemillError(Reason.DEADLINE_EXCEEDED, "the call's deadline has passed"))
        stream.seen()

    # ---- Writing ----

    async def _write_all(self, stream: LiveStream, call: Call, generation: validation.Generation, context: Any) -> None:
        # Accepted follows its metadata whatever has happened to the stream by now: without a message between, metadata
        # and status may travel as one, which gRPC takes for a refusal and retries, running accepted work twice.
        accepted = pb.GenerateResponse(accepted=self._accepted(stream))
        await context.send_initial_metadata(())
        await call.write(context, accepted)
        clock = OutputClock(self._metrics, stream.replay.arrival)
        while True:
            stream.seen()
            piece = stream.output.take()
            if piece is not None:
                clock.took(len(piece.token_ids))
                message = delta(piece, generation)
                if message is not None:
                    clock.delta()
                    await call.write(context, message)
            elif stream.error is not None:
                raise stream.error
            elif stream.output.ending is not None:
                break
            else:
                await self._next_news_of_output(stream)
        clock.ended()
        await self._wait_for_bill(stream)
        call.finish()  # who has read Finished may use the id again
        await call.write(context, pb.GenerateResponse(finished=finished(stream)))
        clock.finished()
        cached = num_cached(stream)
        self._metrics.prompt_tokens.labels("cached").inc(cached)
        self._metrics.prompt_tokens.labels("computed").inc(stream.replay.num_prompt_tokens - cached)

    async def _next_news_of_output(self, stream: LiveStream) -> None:
        if stream.cancel_requested:
            # The scheduler's last word (or its absence for a second) ends the output.
            await self._wait_for_bill(stream)
            stream.output.end(Ending(EndKind.CANCELLED))
        else:
            await self._next_news(stream)

    async def _wait_for_bill(self, stream: LiveStream) -> None:
        if stream.bill is None and stream.admitted:
            try:
                async with asyncio.timeout(_BILL_WAIT_S):
                    while stream.bill is None:
                        await stream.wait()
                        stream.seen()
            except TimeoutError:
                pass

    def _accepted(self, stream: LiveStream) -> pb.Accepted:
        return pb.Accepted(
            request_id=stream.replay.request_id,
            num_prompt_tokens=stream.replay.num_prompt_tokens,
            seed=stream.replay.sampling.seed,
            model=self._model.name,
        )

    # ---- The other methods ----

    async def Cancel(self, request: pb.CancelRequest, context: Any) -> pb.CancelResponse:  # noqa: N802
        """End a live request of the same tenant."""
        request_id = validation.check_request_id(request.request_id)
        call = self._registry.find(_TENANT, request_id)
        if call is None:
            return pb.CancelResponse(cancelled=False)
        call.cancel()
        if call.stream is not None:
            self._scheduler.cancel(call.stream.stream_id)
        return pb.CancelResponse(cancelled=True)

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:  # noqa: N802
        """Token ids exactly as Generate would compute them."""
        self._check_model(request.model)
        kind = request.WhichOneof("input")
        if kind is None:
            raise invalid("input", "one of text and chat must be set")
        if kind == "chat":
            validation.check_tokenize_chat(request.chat, self.limits())
            return pb.TokenizeResponse(token_ids=await self._prompts.chat(request.chat))
        wanted = request.add_special_tokens if request.HasField("add_special_tokens") else True
        return pb.TokenizeResponse(token_ids=await self._prompts.text(request.text, add_special_tokens=wanted))

    async def Detokenize(self, request: pb.DetokenizeRequest, context: Any) -> pb.DetokenizeResponse:  # noqa: N802
        """Text of token ids."""
        self._check_model(request.model)
        validation.check_token_ids(request.token_ids, self.limits())
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=await self._pool.decode(request.token_ids, skip_special_tokens=skip))


def _check_deadline(deadline: float | None) -> None:
    if deadline is not None and time.monotonic() >= deadline:
        raise PagemillError(Reason.DEADLINE_EXCEEDED, "the call's deadline has passed")


def _loop_time(monotonic: float) -> float:
    """A moment of `time.monotonic` on the event loop's clock."""
    return asyncio.get_running_loop().time() + (monotonic - time.monotonic())
