"""Compiles one grammar, to see whether that ends. A script: ``grammars`` runs it in a process of its own.

A JSON schema is a client's program for the compiler. Here the kernel bounds what it costs: CPU time and memory, and the
stack is small, so that what passes here has room in any thread of a service. It imports nothing of radixkv, since it
is started for each grammar that isn't known yet (0.1 s).

Standard input: JSON with ``grammar``, ``limits``, ``seconds``, ``bytes`` and ``stack_bytes``. Standard output: JSON
with ``error``, empty if there is none. Without an output the grammar is too much.
"""

import json
import os
import resource
import signal
import sys
import threading


def main() -> None:
    """Try the grammar of standard input."""
    os.nice(10)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    import llguidance

    order = json.load(sys.stdin)
    threading.stack_size(order["stack_bytes"])
    resource.setrlimit(resource.RLIMIT_DATA, (order["bytes"], order["bytes"]))
    signal.setitimer(signal.ITIMER_PROF, order["seconds"])
    found: list[str] = []

    def compile_it() -> None:
        limits = llguidance.LLParserLimits(**order["limits"])
        matcher = llguidance.LLMatcher(
            llguidance.LLTokenizer("byte"), order["grammar"], log_level=0, limits=limits
        )
        if not matcher.is_error():
            matcher.compute_bitmask()
        found.append(matcher.get_error())

    thread = threading.Thread(target=compile_it)
    thread.start()
    thread.join()
    json.dump({"error": found[0]}, sys.stdout)


if __name__ == "__main__":
    main()
