"""List the GPUs that a process can use, from CUDA's driver alone.

Run as a script in a process of its own: a rank must set CUDA's environment variables, which depend on the
layout, before it starts CUDA. It imports only the standard library.
"""

from __future__ import annotations

import ctypes
import json
import sys
from typing import Any

_NUM_MULTIPROCESSORS = 16
"""CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT of cuDeviceGetAttribute."""
_NAME_BYTES = 256


def list_gpus(driver: Any) -> list[dict[str, Any]]:
    """Return name, memory, multiprocessors, and access to a second GPU's memory for each visible GPU.

    Args:
        driver: the library libcuda.

    Returns:
        One dictionary for each GPU; none if the driver finds no GPU.
    """
    count = ctypes.c_int()
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [_describe(driver, ordinal, count.value) for ordinal in range(count.value)]


def _describe(driver: Any, ordinal: int, count: int) -> dict[str, Any]:
    name, memory = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    device, other, num_sms, can_access = (ctypes.c_int() for _ in range(4))
    _check(driver.cuDeviceGet(ctypes.byref(device), ordinal))
    _check(driver.cuDeviceGetName(name, _NAME_BYTES, device))
    _check(driver.cuDeviceTotalMem_v2(ctypes.byref(memory), device))
    _check(driver.cuDeviceGetAttribute(ctypes.byref(num_sms), _NUM_MULTIPROCESSORS, device))
    if count > 1:
        _check(driver.cuDeviceGet(ctypes.byref(other), (ordinal + 1) % count))
        _check(driver.cuDeviceCanAccessPeer(ctypes.byref(can_access), device, other))
    return {
        "name": name.value.decode(),
        "memory_bytes": memory.value,
        "num_sms": num_sms.value,
        "has_peer_access": count == 1 or bool(can_access.value),
    }


def _check(status: int) -> None:
    if status != 0:
        raise RuntimeError(f"CUDA's driver returned error {status}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(list_gpus(ctypes.CDLL("libcuda.so.1"))))
