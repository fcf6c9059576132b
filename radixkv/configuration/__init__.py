"""The settings of ``radixkv serve`` and ``radixkv route``, and where their values come from.

    flag > environment > file > default

``definitions`` has every setting once: name, meaning, kind, bounds, default, and whether a running process can take a
new value. Options, environment variables, keys of the file, checks and the reference are made of it. ``config_file``
reads the file, ``precedence`` puts the sources together, ``private_files`` warns of secrets that others can read.
``service.options`` parses the texts into frozen values.

Importing these modules loads only the standard library. Reading a file needs PyYAML, of the extra ``http``.
"""
