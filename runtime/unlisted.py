"""Names that may lie beside a bundle's own files, since nothing reads them: what systems and version control leave, and documents.

What some loader would read cannot be listed (every runtime has names of its own, and takes `*.json` or `*.py` by its
own rules), so what none reads is, and whatever else lies there is refused.
"""

from __future__ import annotations

import os
import re
import stat

_LEFT_BEHIND = {"thumbs.db", "desktop.ini"}  # by Windows, whose hidden files have no dot
_DOCUMENT = re.compile(r"(readme|licen[cs]e|notice|copying)[^.]*(\.md|\.txt|\.rst)?|.+\.md", re.DOTALL)


def is_ignored(entry: os.DirEntry[str]) -> bool:
    """Judged by name and kind alone: it is never opened."""
    try:
        mode = entry.stat(follow_symlinks=False).st_mode
    except FileNotFoundError:  # it is gone already
        return True
    name = entry.name.lower()
    if name.startswith("."):  # .DS_Store, .gitattributes; the folders .git and .cache
        return stat.S_ISREG(mode) or stat.S_ISDIR(mode)
    return stat.S_ISREG(mode) and (name in _LEFT_BEHIND or _DOCUMENT.fullmatch(name) is not None)
