"""``python -m radixkv``: the command line, where the ``radixkv`` script isn't on the path."""

from radixkv.cli.main import main

if __name__ == "__main__":
    main()
