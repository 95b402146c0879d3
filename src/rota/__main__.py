"""`python -m rota`."""

from rota.cli import main

if __name__ == "__main__":
    main()
