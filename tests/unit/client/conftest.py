from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.unit.client.fake_gateway import FakeGateway, serving


@pytest.fixture
async def gateway() -> AsyncIterator[FakeGateway]:
    async with serving(FakeGateway()) as fake:
        yield fake
