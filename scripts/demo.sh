#!/usr/bin/env bash
# `make demo`: SmolLM2-135M linearized three ways, trained and measured against itself; prints the table, names the report, and says the time spent.
set -euo pipefail
cd "$(dirname "$0")/.."
mkdir -p .golinear/logs
spent=()
part() {
  local name=$1 start=$SECONDS
  shift
  "$@"
  spent+=("$name $((SECONDS - start)) s")
}
watch_run() {
  # the run's own lines come from the worker; what Prefect's command prints is kept in a file
  tail -n 0 -F .golinear/logs/worker.log 2>/dev/null | sed -u -n "s/^\([0-9:]*\)\.[0-9]* | [A-Z]* *| \(Flow\|Task\) run '[^']*' - /\1  /p" \
    | grep --line-buffered -vE '  (Finished in state Completed\(\)$|Executing deployment|Deployment step|All deployment steps|Running 1 deployment|Running hook|Hook |Beginning flow run)' &
  local tail_pid=$!
  echo "+ prefect deployment run sweep/ablation --watch -p recipes='gla 56+8,gdn 64+0,gdn 56+8'"
  local status=0
  prefect deployment run sweep/ablation --watch --watch-interval 1 -p recipes='gla 56+8,gdn 64+0,gdn 56+8' \
    > .golinear/logs/demo.log 2>&1 || status=$?
  sleep 1
  kill "$tail_pid" 2>/dev/null || true
  [ "$status" = 0 ] || { tail -n 15 .golinear/logs/demo.log; return "$status"; }
}

part install make --no-print-directory install
trap 'golinear down' EXIT
part services golinear up
part sweep watch_run
golinear table
part report golinear report -o .golinear/report
trap - EXIT
part down golinear down
printf 'time: %s' "${spent[0]}"
printf ', %s' "${spent[@]:1}"
echo "; all $SECONDS s"
echo 'again: make up; prefect deployment run sweep/ablation --watch -p mechanisms=gla,gdn -p budgets=56+8,0+0; golinear table'
echo "report: $PWD/.golinear/report/index.html (one file: words, table, figures, settings, where each number comes from)"
