"""The commands, a file per noun. A command reads its options, calls what does the work, and shows what came of it.

Their modules import late, inside the functions: `rota --help` must not wait for a web server and a driver. Their annotations are
evaluated at import, which is how typer wants them: no `from __future__ import annotations` here.
"""
