"""What a scrape of an engine's metrics gives."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from scheduler_svc.metrics import EngineCollector
from tests.oracles.rig import LockstepRig


def samples_of(rig: LockstepRig) -> dict[tuple[object, ...], float]:
    """Values by name and labels, each label a pair, in the order of their names."""
    registry = CollectorRegistry()
    registry.register(EngineCollector(rig.engine))
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(generate_latest(registry).decode())
        for sample in family.samples
    }
