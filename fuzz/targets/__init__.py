"""What is fuzzed, one module a target: ``one(data)`` raises if ``data`` finds a bug. Needs no fuzzer itself."""
