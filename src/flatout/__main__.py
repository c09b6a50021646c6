"""`python -m flatout`."""

from flatout.cli import main

raise SystemExit(main())
