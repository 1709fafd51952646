"""Arrays whose memory XLA owns and nobody has written yet.

A target shard that lies in numpy's memory cannot be donated in place: the first step after a move would need its
state twice. ``jax.numpy.empty`` writes zeros first, which costs as much as the copy itself. So the buffers come out of
a program with one custom call that does nothing. The call follows XLA's foreign function interface
(``xla/ffi/api/c_api.h``, which jaxlib ships), written down here with ctypes.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

_TARGET = "dynajax_uninitialised"
_METADATA_EXTENSION = 1
_API_VERSION = (0, 3)


class _Extension(ctypes.Structure):
    """XLA_FFI_Extension_Base."""


_Extension._fields_ = [
    ("struct_size", ctypes.c_size_t),
    ("type", ctypes.c_int),
    ("next", ctypes.POINTER(_Extension)),
]


class _ApiVersion(ctypes.Structure):
    """XLA_FFI_Api_Version."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.POINTER(_Extension)),
        ("major_version", ctypes.c_int),
        ("minor_version", ctypes.c_int),
    )


class _Metadata(ctypes.Structure):
    """XLA_FFI_Metadata, as far as it is written here."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("api_version", _ApiVersion), ("traits", ctypes.c_uint32))


class _MetadataExtension(ctypes.Structure):
    """XLA_FFI_Metadata_Extension."""

    _fields_ = (("base", _Extension), ("metadata", ctypes.POINTER(_Metadata)))


class _CallFrame(ctypes.Structure):
    """XLA_FFI_CallFrame, as far as it is read here."""

    _fields_ = (("struct_size", ctypes.c_size_t), ("extension_start", ctypes.POINTER(_Extension)))


@ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.POINTER(_CallFrame))
def _do_nothing(frame: Any) -> None:
    """Answer XLA's question for the interface version; leave the outputs as they were allocated."""
    extension = frame.contents.extension_start
    if extension and extension.contents.type == _METADATA_EXTENSION:
        metadata = ctypes.cast(extension, ctypes.POINTER(_MetadataExtension)).contents.metadata.contents
        metadata.api_version.major_version, metadata.api_version.minor_version = _API_VERSION


@functools.cache
def _register() -> None:
    capsule = ctypes.pythonapi.PyCapsule_New
    capsule.restype, capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    handler = capsule(ctypes.cast(_do_nothing, ctypes.c_void_p), b"xla._CUSTOM_CALL_TARGET", None)
    jax.ffi.register_ffi_target(_TARGET, handler, platform="cpu")


@functools.lru_cache(maxsize=1 << 10)
def _call(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """What the programs of all devices are compiled from: one function, so that it is lowered once."""
    _register()
    return jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct(shape, dtype))


@functools.lru_cache(maxsize=1 << 14)
def allocator(device: jax.Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Any:
    """A compiled program without arguments that returns an array. It takes 8 ms to compile, and 10 microseconds to run.

    It is of one device, so that the thread that calls it allocates. A program of several runs in threads of XLA, which
    allocate each from a part of the heap of its own, where memory that was freed a moment ago is out of reach.

    Args:
        device: a CPU device.
        shape, dtype: of the array; of at least a byte an element.
    """
    return jax.jit(_call(shape, dtype), out_shardings=SingleDeviceSharding(device)).lower().compile()


def allocators_compiled() -> int:
    """Programs compiled since the process began."""
    return allocator.cache_info().misses


def allocate(
    devices: Sequence[jax.Device], shape: tuple[int, ...], dtype: np.dtype[Any], count: int
) -> list[list[jax.Array]]:
    """``count`` times one unwritten array of ``shape`` on each of the CPU ``devices``, in their order."""
    programs = [allocator(device, shape, dtype) for device in devices]
    made = [[program() for program in programs] for _ in range(count)]
    # Waited for with the interpreter's lock let go, which the custom call needs: asking an unfinished array for its
    # address would wait with the lock held, and for ever.
    return jax.block_until_ready(made)
