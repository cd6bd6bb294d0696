#!/bin/sh
# Runs a command that prints nothing for a minute or more, and prints how long it has taken so far: on a terminal one
# line that is rewritten, elsewhere a line every 20 seconds.
#     scripts/step.sh "Compiling the kernel (1 to 2 minutes)" command [arguments]
set -u
words=$1
shift
begin=$(date +%s)
terminal=
[ ! -t 1 ] || terminal=1
if [ -n "$terminal" ]; then end=''; pause=1; else end='\n'; pause=20; fi

report() {
  printf '%s%s: %s'"$end" "${terminal:+$(printf '\r\033[K')}" "$words" "$1"
}

# the command has the foreground, so that an interrupt ends it
(
  waited=0
  while sleep 1; do
    waited=$((waited + 1))
    [ $((waited % pause)) -ne 0 ] || report "$(($(date +%s) - begin)) s"
  done
) &
clock=$!
trap 'kill $clock 2>/dev/null' EXIT
trap 'exit 130' INT TERM
report "..."
"$@"
status=$?
kill $clock
wait $clock 2>/dev/null
end='\n'
[ $status -eq 0 ] && report "$(($(date +%s) - begin)) s" || report "failed after $(($(date +%s) - begin)) s"
exit $status
