"""latentpool: the shared nouns of the three services, and the public client library."""

from importlib.metadata import version

__version__ = version("latentpool")
