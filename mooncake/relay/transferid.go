// SPDX-License-Identifier: Apache-2.0

package relay

import (
	"strconv"
	"strings"
)

// transferID is a parsed transfer id of one of D's requests.
type transferID struct {
	base   string // the id that P knows
	repeat bool   // the same KV once more: from memory if the relay has it
	only   bool   // with repeat: from memory, or the request fails
	prefix string // the id of another transfer with the same first blocks; "" if none
	blocks int    // how many blocks are the same
}

// parseID reads a transfer id:
//
//	T            P's transfer
//	T#2          the same again; the last # counts, with nothing but digits behind it
//	T#2!         the same again, and P is not asked
//	T^PREFIX:12  T, whose first 12 blocks are those of PREFIX
func parseID(id string) transferID {
	t := transferID{base: id}
	if i := strings.LastIndexByte(id, '#'); i > 0 {
		if n, only := strings.CutSuffix(id[i+1:], "!"); digits(n) {
			t.base, t.repeat, t.only = id[:i], true, only
		}
	}
	at := strings.LastIndexByte(t.base, '^')
	colon := strings.LastIndexByte(t.base, ':')
	if at <= 0 || colon < at+2 || !digits(t.base[colon+1:]) {
		return t
	}
	n, err := strconv.Atoi(t.base[colon+1:])
	if err != nil || n > 1<<31 {
		return t
	}
	t.prefix, t.blocks = t.base[at+1:colon], n
	t.base = t.base[:at]
	return t
}

func digits(s string) bool {
	return s != "" && strings.Trim(s, "0123456789") == ""
}
