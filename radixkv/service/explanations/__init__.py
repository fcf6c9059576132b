"""Why a request doesn't find the prefix of an earlier one: exact, from the bodies of both, without a running service.

    bodies ──▶ requests (``bodies``) ──▶ differences, each with its repair (``differences``, ``lines``, ``tool_lists``)
                                          │
                 explanation ◀── repairs applied one by one, each rendered and compared (``explain``)

Everything is rendered by the functions that the service renders with (``service.prompts``), so every number of tokens
is the cache's. Nothing is estimated: what a change saves is the prefix of the changed bodies less that of the given
ones.
"""
