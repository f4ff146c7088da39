"""The body of a server-side apply, which the API server reads as YAML."""

import json
import re
from typing import Any, Final

# YAML 1.1 refuses these characters as they are, or reads them as line breaks.
_ESCAPED: Final = re.compile("[\x7f-\xa0\u2028\u2029\ufeff\ufffe\uffff]")
_HALVES: Final = re.compile("[\ud800-\udfff]")


def apply_body(obj: Any) -> str:
    """JSON that is YAML, too.

    JSON writes a character beyond 16 bits, such as an emoji, as two escapes, which YAML refuses:
    here it stands as it is. Half of such a pair is no character, and becomes U+FFFD, as in the API
    server's own JSON.
    """
    text = json.dumps(obj, ensure_ascii=False)
    text = _ESCAPED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)
    return _HALVES.sub("\ufffd", text)
