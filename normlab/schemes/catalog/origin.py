"""Where a scheme comes from that its name alone does not find."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Origin:
    """`where@content:cls`: a file or a module, a hash of its source, and a class in it."""

    where: str
    """Absolute path of the file, or name of the module."""
    content: str | None
    """The hash; None where there is no source to read."""
    cls: str

    @property
    def shared(self) -> Origin:
        """The same without the folder of a file: equal on every machine."""
        return dataclasses.replace(self, where=os.path.basename(self.where))

    def __str__(self) -> str:
        return f"{self.where}@{self.content}:{self.cls}" if self.content else f"{self.where}:{self.cls}"
