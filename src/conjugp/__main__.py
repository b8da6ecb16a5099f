"""``python -m conjugp`` is the same as ``conjugp``."""

from conjugp.cli import main

if __name__ == "__main__":
    main()
