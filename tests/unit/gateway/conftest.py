"""Property tests here state what holds, not how fast: machines that build in parallel are slow at times."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile("gateway", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("gateway")
