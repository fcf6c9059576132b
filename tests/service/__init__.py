"""Tests of the HTTP service, over real sockets."""
