"""Health check inside a container: `health.py gateway | scheduler | executor`; exit status 0 is healthy.

gateway      answers the gRPC health service for readiness: a scheduler and an executor are connected
scheduler    serves its metrics page
executor     serves its metrics page and has had a session with a scheduler

An executor or scheduler that hangs is noticed by its peers, through leases, far sooner than by a health check.
"""

from __future__ import annotations

import os
import sys
from urllib.request import urlopen

TIMEOUT_S = 2.0
READINESS = "pagemill.v1.InferenceService"
METRICS_PORTS = {"scheduler": 9101, "executor": 9102}


def gateway_problem() -> str | None:
    """What keeps the gateway from serving; None if nothing does."""
    # Only the gateway's image has gRPC.
    import grpc  # noqa: PLC0415
    from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: PLC0415

    with grpc.insecure_channel(f"127.0.0.1:{os.environ.get('PAGEMILL_PORT', '50051')}") as channel:
        request = health_pb2.HealthCheckRequest(service=READINESS)
        try:
            status = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S).status
        except grpc.RpcError as error:
            return f"no answer: {error.code().name}"
    return None if status == health_pb2.HealthCheckResponse.SERVING else "not serving"


def metrics_problem(role: str) -> str | None:
    """What is wrong with a process that serves metrics; None if nothing is."""
    port = os.environ.get("PAGEMILL_METRICS_PORT", METRICS_PORTS[role])
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=TIMEOUT_S) as answer:
            lines = answer.read().decode().splitlines()
    except OSError as error:
        return f"no metrics page: {error}"
    if role == "executor" and not any(float(x.split()[-1]) for x in lines if x.startswith("pagemill_sessions_total ")):
        return "no session with a scheduler yet"
    return None


def main(role: str) -> int:
    """Print the problem, if there is one, for `docker inspect`."""
    problem = gateway_problem() if role == "gateway" else metrics_problem(role)
    sys.stdout.write(f"{problem or 'healthy'}\n")
    return int(problem is not None)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
