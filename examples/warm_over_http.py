"""Warm a prompt over HTTP, look it up, and complete it: first cold, then warm.

    radixkv serve &                                # or: make run
    python examples/warm_over_http.py              # [URL [KEY]]

It needs only the standard library, so it is also a short description of the interface.
"""

from __future__ import annotations

import json
import sys
import time
import urllib.request
from typing import Any

INSTRUCTIONS = "".join(
    f"Rule {number}: answer politely, name the page of the manual, and ask if in doubt.\n"
    for number in range(1, 55)
)
QUESTION = "How do I return a parcel?"


def post(url: str, key: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    """POST a JSON body and return the JSON reply."""
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return dict(json.load(reply))


def main(url: str = "http://127.0.0.1:8400", key: str = "demo-acme") -> None:
    """Warm the instructions, then ask a question about them, with and without the warmed prefix."""
    salt = f"example-{time.time_ns()}"
    warmed = post(url, key, "/v1/warm", {"prompt": INSTRUCTIONS, "salt": salt})
    print(f"warmed {warmed['tokens']} tokens in {warmed['blocks']} blocks ({warmed['left_out']} left out)")

    found = post(url, key, "/v1/lookup", {"prompt": INSTRUCTIONS + QUESTION, "salt": salt})
    print(f"a continuation finds {found['matched_tokens']} of them")

    for name, where in (("cold", salt + "-cold"), ("warm", salt)):
        body = {"prompt": INSTRUCTIONS + QUESTION, "max_tokens": 8, "temperature": 0, "salt": where}
        reply = post(url, key, "/v1/completions", body)
        cached = reply["usage"]["prompt_tokens_details"]["cached_tokens"]
        first = reply["timings"]["time_to_first_token_s"]
        print(
            f"{name}: {cached} of {reply['usage']['prompt_tokens']} tokens cached, first token after {first:.3f} s"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
