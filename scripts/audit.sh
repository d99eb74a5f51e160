#!/usr/bin/env bash
# Known vulnerabilities of the installed packages, by the OSV database. Exit 1 when there are some; a note where it cannot be asked.
set -euo pipefail
cd "$(dirname "$0")/.."
if ! python -c 'import socket; socket.create_connection(("api.osv.dev", 443), timeout=3)' 2> /dev/null; then
  echo "audit: the OSV database (api.osv.dev) is not reached from here; nothing was audited"
  exit 0
fi
tool=.venv/audit/bin
[ -x $tool/pip-audit ] || { python -m venv .venv/audit && $tool/pip install -q --disable-pip-version-check pip-audit; }
exec $tool/pip-audit --vulnerability-service osv --progress-spinner off \
  --path "$(python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')"
