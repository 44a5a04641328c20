"""Write 2,000 beginnings of functions, taken from Python's standard library, as JSON lines.

python beginnings.py beginnings.jsonl
"""

from __future__ import annotations

import json
import re
import sys
import sysconfig
from pathlib import Path

COUNT = 2000


def main() -> None:
    """Write the file that is named on the command line."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for path in sorted(library.glob("*.py")):
        found |= dict.fromkeys(
            re.findall(r"^ *def \w+\(self", path.read_text(errors="ignore"), re.M)
        )
    lines = [
        json.dumps({"id": f"b{number}", "beginning": text.strip()})
        for number, text in enumerate(list(found)[:COUNT])
    ]
    Path(sys.argv[1]).write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
