"""`python -m cosmati`: the command `cosmati`, for launchers that start modules."""

from cosmati.cli.main import app

app()
