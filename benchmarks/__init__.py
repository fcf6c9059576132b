"""Measurements for those who develop radixkv: what a change costs, and the figures of ``docs/measurements``.

    python -m benchmarks.policies --help        in a checkout, with the environment that ``make`` sets up

    policies        the cost of each eviction policy a request, beside LRU
    concurrency     a match beside evictions, and how long each call holds the cache's lock
    scheduling      a decision over a long queue
    serving         completions side by side against one at a time, over HTTP
    control         an engine's steps beside a client that polls its control channel
    tier_dtype      what a model says over KV that came back from lossy tiers
    beside_lmcache  host memory and disk, beside LMCache's
    vllm_steps      CPU of the cache a step, beside vLLM's own
    sglang_steps    CPU of the scheduler a step, beside SGLang's own cache

The last three need Pythons of other environments; they say which. What users run on their own machines is
``radixkv bench`` (``radixkv/bench``). Wheels have no benchmarks.
"""
