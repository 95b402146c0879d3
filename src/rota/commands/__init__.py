"""The commands, with a module for each noun. A command reads its options, calls the other layers, and prints the result.

The modules import drivers and servers inside functions, so that `rota --help` is fast. They do not use
`from __future__ import annotations`, because typer evaluates the annotations.
"""
