"""What each tenant used: sums in memory for ``GET /v1/usage``, and one JSON line for each request in a folder.

    meter     who pays for a request that ended, and what tenants hold over time
    sums      sums by hour, tenant, key, model and kind, in memory
    writer    takes records without waiting, and appends them to files in a thread
    folder    the files: their names, the records in them, and the sums of each file
    records   what one record says, as Python and as JSON

A record has names and counts of tokens. It has no text, no token id and no key. Nothing here proves that the files were
not changed later: that is the work of the pipeline that collects them.
"""
