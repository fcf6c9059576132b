"""The command line of radixkv."""
