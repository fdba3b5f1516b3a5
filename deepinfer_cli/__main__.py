"""``python -m deepinfer_cli``: the command without an installation."""

import sys

from deepinfer_cli.main import main

sys.exit(main())
