"""The NumPy backend: the definition of every operation of kernels.api, one file a duty."""

from kernels.api import Kernels
from kernels.numpy.backend import NumpyKernels

__all__ = ["NumpyKernels"]

_PROTOCOL: Kernels = NumpyKernels("f32")
