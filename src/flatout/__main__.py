"""`python -m flatout`."""

from flatout.cli.main import main

raise SystemExit(main())
