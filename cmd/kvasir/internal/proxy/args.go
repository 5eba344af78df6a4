// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"slices"
	"strings"
)

// Args writes the flags of vllm-router, sglang-router and smg that take several values as kvasir proxy takes them:
// --prefill URL PORT becomes --prefill "URL PORT", --worker-urls A B becomes --engine A --engine B.
// Its switches that mean nothing here are dropped.
func Args(args []string) []string {
	at := 0
	for at < len(args) && strings.HasPrefix(args[at], "--log-") {
		if at++; !strings.Contains(args[at-1], "=") {
			at++ // its value
		}
	}
	if at >= len(args) || args[at] != "proxy" {
		return args
	}
	out := slices.Clone(args[:at+1])
	value := func(i int) bool { return i < len(args) && !strings.HasPrefix(args[i], "-") }
	for i := at + 1; i < len(args); i++ {
		switch args[i] {
		case "--vllm-pd-disaggregation", "--pd-disaggregation", "--dp-aware":
			// dropped: --prefill implies P and D, and the proxy always chooses ranks where engines have several
		case "--prefill":
			if out = append(out, args[i]); !value(i + 1) {
				continue
			}
			i++
			if out = append(out, args[i]); value(i+1) && isRegistryPort(args[i+1]) {
				i++
				out[len(out)-1] += " " + args[i]
			}
		case "--worker-urls":
			if !value(i + 1) {
				out = append(out, "--engine") // its value is missing
			}
			for ; value(i + 1); i++ {
				out = append(out, "--engine", args[i+1])
			}
		default:
			out = append(out, args[i])
		}
	}
	return out
}

// isRegistryPort reports whether a word stands for the registry behind a URL.
func isRegistryPort(word string) bool {
	return word == "none" || word != "" && strings.Trim(word, "0123456789") == ""
}
