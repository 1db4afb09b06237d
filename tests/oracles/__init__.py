"""Executors without a model, for tests: they speak the real wire, and what they must answer can be computed.

`chain`: the next id is a hash of all ids before it. `kv`: the same ids, but computed only from what it wrote into
blocks. `scripted`: prescribed ids and faults. `expected` says what a stream must be.
"""
