#!/usr/bin/env bash
# Runs the README's curl commands as written, against a server: `readme.sh http://127.0.0.1:8000`.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
# The block of commands that begins with a curl.
block="$(awk '/^```sh$/ { inside = 1; text = ""; next }
    /^```$/ { if (inside && text ~ /^curl/) print text; inside = 0; next }
    inside { text = text $0 "\n" }' "$here/../../README.md")"
[ -n "$block" ] || { echo "the README has no curl commands" >&2; exit 1; }
bash -euo pipefail -c "${block//localhost:8000/${1#http://}}"
