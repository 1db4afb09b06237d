"""Golden tests compute with torch on all cores; beside other work, threads that wait must sleep rather than spin."""

import os

# Read once, when torch loads its OpenMP library, which the test modules of this folder do at import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
