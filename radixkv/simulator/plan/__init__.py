"""Memory, planned before a start: what a model needs, and what a machine holds of its KV.

    reading    config.json and headers of safetensors, bounded and checked
    families   from a config's fields to a model, for the model types that are known: decoders, latents, hybrids
    model      what is known of a model, and the parts that families make it of
    kv         bytes that the KV and states of layers take, by dtype and number of GPUs
    weights    bytes of weights: from the files, or computed
    planner    blocks by tier, requests at once, dollars, the command to run
    replays    hit rates of these tiers on a trace
    plan       all of it
    report     the plan as text

Nothing here needs torch or a GPU, or runs code of a model. What isn't known is refused by its name: a plan never
guesses.
"""
