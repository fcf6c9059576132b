"""Private folders and files, for whatever outlives the process: tiers and usage records.

system           the system calls, replaced by tests
private_folder   a folder of this user's, of mode 0700, with its lock and small files
"""
