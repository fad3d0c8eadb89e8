#!/usr/bin/env bash
# The tests, in the environment of tools/setup.sh: the main suite, then the Megatron tests with the
# megatron-core of the environment, several ranks over gloo included, then the same with the older
# one beside it, where several ranks run the cases marked "oldest". Each runs even if one before it
# failed; the exit code says whether all passed.
#
# usage: tools/test.sh PYTHON [pytest options for every run]
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=$1
shift
status=0

run() { # NAME COMMAND...
    local name=$1 begin=$SECONDS code=0
    shift
    echo "== $name"
    "$@" || code=$?
    # pytest gives 5 when it ran no test: also a failure here
    [ "$code" -eq 0 ] || status=1
    echo "== $name: exit code $code, $((SECONDS - begin)) s"
}

run "main suite" "$python" -m pytest -q -n 2 -m "not compile" --ignore=tests/megatron \
    --ignore=tests/distributed tests "$@"

# the tests check that the version named here is the one that is imported
megatron() { # VERSION [NAME=VALUE...] COMMAND...
    local version=$1
    shift
    run "megatron-core $version" env PACKHORSE_TEST_MEGATRON="$version" "$@"
}

if version=$("$python" -c 'import importlib.metadata as m; print(m.version("megatron-core"))'); then
    megatron "$version" "$python" -m pytest -q -n 2 --dist loadfile tests/megatron "$@"
    # each case is two or four processes of its own, and all share them
    run "distributed, megatron-core $version" env PACKHORSE_TEST_MEGATRON="$version" \
        "$python" -m pytest -q -n 1 tests/distributed "$@"
else
    echo "== no megatron-core in the environment: its tests cannot run"
    status=1
fi
for folder in "$("$python" -c 'import sys; print(sys.prefix)')"/megatron/*/; do
    [ -d "$folder" ] || continue
    version=$(basename "$folder")
    path=$folder${PYTHONPATH:+:$PYTHONPATH}
    megatron "$version" PYTHONPATH="$path" \
        "$python" -m pytest -q -n 2 --dist loadfile tests/megatron "$@"
    run "distributed, megatron-core $version" \
        env PYTHONPATH="$path" PACKHORSE_TEST_MEGATRON="$version" \
        "$python" -m pytest -q -n 1 -m oldest tests/distributed "$@"
done
exit "$status"
