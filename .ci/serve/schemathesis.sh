#!/usr/bin/env bash
# Calls every route of a server as its description says, and as it doesn't: `schemathesis.sh http://127.0.0.1:8000`.
# First what generates, while the server is awake; then control, whatever state that leaves it in. With the same
# calls each time, and in bounded time.
set -euo pipefail
here="$(cd "$(dirname "$0")" && pwd)"
server="$1"
checks=not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance
checks+=,response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance
failed=0
for tag in generation control; do
    "${SCHEMATHESIS:-schemathesis}" --config-file "$here/schemathesis.toml" run "$server/openapi.json" \
        --include-tag "$tag" --phases examples,coverage,fuzzing --checks "$checks" --generation-deterministic \
        --max-examples "${EXAMPLES:-25}" --request-timeout 30 --warnings off --no-color || failed=1
done
exit "$failed"
