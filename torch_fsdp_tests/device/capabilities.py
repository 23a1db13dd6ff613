"""The names of what a device may be able to do, each with the words for it, and of a backend. Does not import torch."""

from collections.abc import Mapping

STAGED = "staged"  # the backend of this project, see :mod:`.staged`

CAPABILITIES: Mapping[str, str] = {
    "device_memory": "memory of its own, separate from the host's",
    "device_index": "devices with an index",
    "streams": "streams that run work independently",
    "pinned_memory": "host memory pinned for the device",
    "memory_stats": "statistics of its memory allocator",
    "sleep_kernel": "a kernel that keeps the device busy for a given time",
    "peer_access": "devices that can access each other's memory",
    "graphs": "graphs of recorded work",
    "asynchronous_collectives": "collectives that run while the device computes",
    "bf16_collectives": "collectives over bfloat16",
    "fp16_collectives": "collectives over float16",
    "premul_sum": "the reduce op PREMUL_SUM in its collectives",
    "symmetric_memory": "symmetric memory between ranks",
    "fork": "a runtime that starts in a forked process",
    "shared_device": "collectives between ranks that share one device",
}
