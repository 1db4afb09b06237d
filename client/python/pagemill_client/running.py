"""A whole stack for the length of a block, for commands that measure."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from pagemill_client.serve import Stack, run
from pagemill_client.supervisor import ServeError


@contextlib.asynccontextmanager
async def running(stack: Stack) -> AsyncIterator[str]:
    """Start the stack, give its address once it is ready, stop it at the end of the block; at once if that was left by
    an exception. Nothing of it is left in any case.

    Raises ServeError with the stack's own words if it does not come up, and at the end of the block if a process has
    ended within: what was measured then is not what it seems.
    """
    stop, hurry, ready = asyncio.Event(), asyncio.Event(), asyncio.Event()
    said: list[str] = []
    task = asyncio.create_task(
        run(stack, stop, hurry, on_line=lambda *_: None, announce=said.append, on_ready=ready.set)
    )
    started = asyncio.create_task(ready.wait())
    try:
        await asyncio.wait([task, started], return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            raise ServeError("\n".join(said))
        num_said = len(said)
        yield stack.target
        if said[num_said:]:  # after readiness there is nothing to say but that something ended
            raise ServeError("\n".join(said[num_said:]))
    except BaseException:
        hurry.set()
        raise
    finally:
        started.cancel()
        stop.set()
        await task
