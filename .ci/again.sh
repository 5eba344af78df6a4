# Shared by .ci/test.sh and interop/run.sh, which with RERUN=1 run once more what failed once, and say so. Source it.

# What is red at once, however it would end when it is run again: broken builds, races, panics, wrong bytes, and what
# random inputs found: other inputs may not find it again.
bugs='\[(build|setup) failed\]|DATA RACE|panic: |panic serving|fatal error: |BUG:|SIG(SEGV|BUS|ABRT|ILL)'
bugs="$bugs|[Ww]rong (bytes|KV|blocks)|WRONG BYTES|[Oo]ther bytes|[Bb]ytes differ|chunks wrong|wrong_kv=[1-9]"
bugs="$bugs|--- FAIL: Fuzz|\[rapid\] (failed|panic) after"

# shows_bug FILE: whether an output has one of them; prints the first.
shows_bug() { grep -m 1 -E "$bugs" "$1"; }

# unsteady FILE NAME ...: names the tests that failed once and passed when they were run again, with their first output.
# Their lines for docs/unsteady.md are also added to the file $UNSTEADY, if that is set: .ci/run ends with all of them.
unsteady() {
	local output=$1 name
	shift
	printf '\n!!! unsteady: failed once, passed when run again: %s\n!!! its first output:\n' "$*"
	sed 's/^/!   /' "$output"
	echo
	[ -n "${UNSTEADY:-}" ] || return 0
	for name; do
		echo "- $(date -u +%F) $name" >>"$UNSTEADY"
	done
}
