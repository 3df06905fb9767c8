"""Read what a report contains."""

from __future__ import annotations

import json
import re
from typing import Any


def read_answers(page: str) -> dict[str, Any]:
    """Return the answers in the HTML of a report, as a browser finds them: up to the first end of a script."""
    found = re.search(
        r'<script type="application/json" id="answers">(.*?)</script',
        page,
        re.DOTALL | re.IGNORECASE,
    )
    assert found is not None
    answers: dict[str, Any] = json.loads(found[1])
    return answers
