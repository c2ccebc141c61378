# SPDX-License-Identifier: Apache-2.0
"""``python -m kvxfer.cli``: the ``kvxfer`` command where its script is not on the path."""

from kvxfer.cli.main import main

if __name__ == "__main__":
    main()
