package relay

import (
	"strconv"
	"strings"
)

// transferID is what the transfer id of a D's request says.
type transferID struct {
	base   string // what P knows
	again  bool   // the same KV again, from memory if it is there
	prefix string // another transfer, whose first blocks are those of this one; "": none
	blocks int    // how many
}

// parseID reads a transfer id:
//
//	T            P's transfer
//	T#2          the same again; the last # counts, with nothing but digits behind it
//	T^PREFIX:12  T, whose first 12 blocks are those of PREFIX
func parseID(id string) transferID {
	t := transferID{base: id}
	if i := strings.LastIndexByte(id, '#'); i > 0 && digits(id[i+1:]) {
		t.base, t.again = id[:i], true
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
