"""``python -m foretoken`` is ``foretoken``."""

from foretoken.cli.main import main

if __name__ == "__main__":
    main()
