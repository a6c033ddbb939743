"""`python -m router.simulate`."""

from router.simulate.cli import app

app(prog_name="watchword simulate")
