"""stability_probe: from a checkpoint and a batch to a ranked, confirmed cause of a loss spike."""

from stability_probe._version import __version__

__all__ = ["__version__"]
