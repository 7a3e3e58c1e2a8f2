"""Commands run in a folder of their own."""

from support.command_line import here as here
