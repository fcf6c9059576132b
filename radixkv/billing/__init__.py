"""Records of what tenants used, for billing: JSON lines that survive a crash, chained by MACs.

    usage_writer     takes records without waiting, and writes them in a thread
      pending        records that wait to be written: bounded for each tenant
      usage_appender the files: chained lines, rotated by hour and size
    usage_check      checks the chain of a folder, and sums its records
    usage_sums       sums by hour, tenant, key, model and kind, in memory
    usage_folder     names of the files, keys of the chain
    mac_chain        one line: its number, its fields, its MAC
    usage_record     what one record says

A record is written once, and again after a failed write. Each has an id, so a reader that gets one twice can tell. It
has tokens and names, and no token id, no text and no key.
"""
