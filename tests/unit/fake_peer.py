"""A worker of `bench.peers` that answers at once; run by `test_peers`."""

import json
import os
import sys

sys.stdout.write(json.dumps({"about": {"pid": os.getpid()}}) + "\n")
sys.stdout.flush()
for line in sys.stdin:
    requests = json.loads(line)["requests"]
    arrivals = [[[0.5, num_outputs]] for _, num_outputs, _ in requests]
    sys.stdout.write(json.dumps({"sent": [0.0] * len(requests), "arrivals": arrivals}) + "\n")
    sys.stdout.flush()
