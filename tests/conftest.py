"""Settings every test process needs before NumPy is imported."""

import os

# The NumPy backend's bits are those of one BLAS thread; children inherit the setting.
os.environ["OPENBLAS_NUM_THREADS"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"
