"""The processes of a world find their programs in the persistent compilation cache at their second start."""

import json
import socket
import subprocess
import sys
from pathlib import Path

MEMBER = """
import json, sys
from waypath.workers import jax_compat
coordinator, index, cache_dir = sys.argv[1], int(sys.argv[2]), sys.argv[3]
jax_compat.set_environment(1, platform="cpu", cache_dir=cache_dir)
service = jax_compat.host_coordination_service(coordinator, 2) if index == 0 else None
jax_compat.join_world(jax_compat.World(coordinator, index, 2))
import jax
found = {"cache_hits": 0, "compile_requests_use_cache": 0}
def count(event, **_):
    name = event.rpartition("/")[2]
    found[name] = found.get(name, 0) + 1
jax.monitoring.register_event_listener(count)
mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
total = jax.jit(lambda: jax.numpy.arange(8.0).sum(), out_shardings=everywhere)
assert float(total()) == 28.0
jax_compat.leave_world()
print(json.dumps(found))
"""


def start_world(cache: Path) -> list[dict[str, int]]:
    """What each of two processes counted, by jax's names of its cache events."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    members = [
        subprocess.Popen(
            [sys.executable, "-c", MEMBER, coordinator, str(index), str(cache)], stdout=subprocess.PIPE, text=True
        )
        for index in range(2)
    ]
    try:
        return [json.loads(member.communicate(timeout=120)[0].splitlines()[-1]) for member in members]
    finally:
        for member in members:
            member.kill()
            member.wait()


def test_the_second_start_compiles_nothing(tmp_path: Path) -> None:
    assert [found["cache_hits"] for found in start_world(tmp_path)] == [0, 0]
    for found in start_world(tmp_path):
        assert found["cache_hits"] == found["compile_requests_use_cache"] > 0
