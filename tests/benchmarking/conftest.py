"""Commands run in a folder of their own."""

from commands import here as here
