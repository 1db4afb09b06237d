"""What an executor's lanes must hold, to be compared with what it says they do."""

from __future__ import annotations

from scheduler_svc.core.running import RunningSet


def num_mapped_blocks(running: RunningSet) -> int:
    """Distinct device blocks in the tables of all running sequences; O(blocks).

    Right after a plan was made these are the tables of all lanes that the executor has once it has run the plan: it
    carries every release, admission and append up to then.
    """
    mapped: set[int] = set()
    for seq in running:
        if seq.table is not None:
            mapped.update(seq.table.block_ids)
    return len(mapped)
