"""`python -m rota.demo [--json]`"""

import sys

from rota.demo.main import main

sys.exit(main(json_output="--json" in sys.argv[1:]))
