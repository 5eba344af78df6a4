# Shared by .ci/test.sh and interop/run.sh, which with RERUN=1 run once more what failed once, and say so. Source it.

# What is red at once, however it would end when it is run again: broken builds, races, panics, wrong bytes, and what
# random inputs found: other inputs may not find it again.
bugs='\[(build|setup) failed\]|DATA RACE|panic: |panic serving|fatal error: |BUG:|SIG(SEGV|BUS|ABRT|ILL)'
bugs="$bugs|[Ww]rong (bytes|KV|blocks)|WRONG BYTES|[Oo]ther bytes|[Bb]ytes differ|chunks wrong|wrong_kv=[1-9]"
bugs="$bugs|--- FAIL: Fuzz|\[rapid\] (failed|panic) after"

# shows_bug FILE: whether an output has one of them; prints the first.
shows_bug() { grep -m 1 -E "$bugs" "$1"; }

# unsteady WHAT FILE: names what failed once and passed when it was run again, with its first output. The line is also
# added to the file $UNSTEADY, if that is set: .ci/run ends with all of them.
unsteady() {
	local line="unsteady: $1 failed once, passed when run again"
	printf '\n!!! %s\n!!! its first output:\n' "$line"
	sed 's/^/!   /' "$2"
	echo
	[ -z "${UNSTEADY:-}" ] || echo "$line" >>"$UNSTEADY"
}
