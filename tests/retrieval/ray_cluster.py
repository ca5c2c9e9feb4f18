"""A Ray cluster of two nodes of one CPU each on this machine; started by tests, in a process of its own.

Prints its address. The line "kill" on standard input kills a worker process of Ray Data, "lose" the second
node; both are answered by "done". The end of standard input ends the cluster.
"""

import contextlib
import sys
import time

import psutil
from ray._private import services
from ray.cluster_utils import Cluster

NODE = {"num_cpus": 1, "object_store_memory": 100 << 20}
find_node = services.get_node


def find_node_patiently(*of):
    """Ray waits 30 seconds for a node to start, which is too short beside other tests."""
    end = time.monotonic() + 200
    while time.monotonic() < end:
        with contextlib.suppress(RuntimeError):
            return find_node(*of)
        time.sleep(0.5)
    return find_node(*of)


services.get_node = find_node_patiently
cluster = Cluster(initialize_head=True, head_node_args=NODE | {"include_dashboard": False})
other = cluster.add_node(**NODE)
print(cluster.address, flush=True)
for line in sys.stdin:
    if line.strip() == "kill":
        children = psutil.Process().children(recursive=True)
        next(child for child in children if "".join(child.cmdline()).startswith("ray::MapWorker")).kill()
    else:
        cluster.remove_node(other, allow_graceful=False)
    print("done", flush=True)
cluster.shutdown()
