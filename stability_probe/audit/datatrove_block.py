"""The audit as a filter block for datatrove, whose local, Slurm and Ray executors then do the distribution.

pipeline = [JsonlReader(...), TokenAuditFilter("tokenizer.json"), JsonlWriter(...)]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stability_probe.audit.rows import flagged_rows
from stability_probe.audit.vocabulary import Vocabulary
from stability_probe.errors import ProbeError

try:
    from datatrove.pipeline.filters.base_filter import BaseFilter
except ImportError as error:
    raise ProbeError(
        "cannot make a datatrove filter",
        "the datatrove library is not installed",
        'pip install "stability-probe[datatrove]"',
    ) from error

if TYPE_CHECKING:
    from datatrove.data import Document
    from datatrove.pipeline.writers.disk_base import DiskWriter


class TokenAuditFilter(BaseFilter):
    """Drops documents that the token audit flags high or critical; the first flag is the reason.

    Args:
        tokenizer: `tokenizer.json` or a folder that holds one; loaded once in every task.
        exclusion_writer: where dropped documents go, with `filter_reason` in their metadata.
    """

    name = "token audit"

    def __init__(self, tokenizer: str, exclusion_writer: DiskWriter | None = None) -> None:
        super().__init__(exclusion_writer)
        self.tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None

    def filter(self, doc: Document) -> bool | tuple[bool, str]:
        """True keeps the document."""
        if self._vocabulary is None:
            self._vocabulary = Vocabulary.load(self.tokenizer)
        ids = self._vocabulary.encode([doc.text])[0]
        found = flagged_rows(
            np.atleast_2d(ids),
            mask_BT=None,
            vocab_size=self._vocabulary.size,
            vocabulary=self._vocabulary,
            baseline=None,
            pad_id=None,
            eos_id=self._vocabulary.eos_id,
            round_trip_rows=0,
        )
        return (False, found[0].flags[0]) if found else True

    def __getstate__(self) -> dict[str, Any]:
        """Without the loaded tokenizer: executors pickle their pipeline."""
        return {**self.__dict__, "_vocabulary": None}
