"""The fuzz targets, one module each: ``one(data)`` raises if ``data`` finds a bug. It needs no fuzzer itself."""
