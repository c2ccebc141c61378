# SPDX-License-Identifier: Apache-2.0
"""Write what of the documents comes from the code: docs/options.md and docs/commands.md.

``make docs`` runs this. Tests run it too and compare: a setting without a sentence, an option of a
store that is not described, or a command that prints something else fails them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from doc_commands import commands_page
from doc_options import options_page

DOCS = Path(__file__).resolve().parent.parent / "docs"


def main(arguments: list[str]) -> int:
    """Write the pages that are named, both by default."""
    pages = {"options": options_page, "commands": commands_page}
    for name in arguments or pages:
        (DOCS / f"{name}.md").write_text(pages[name](), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
