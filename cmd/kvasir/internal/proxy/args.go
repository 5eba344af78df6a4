// SPDX-License-Identifier: Apache-2.0

package proxy

import (
	"slices"
	"strings"
)

// Args rewrites a command line of vllm-router, sglang-router or smg for kvasir proxy. Flags with several values become several flags or
// one value: --prefill URL PORT becomes --prefill "URL PORT", --worker-urls A B becomes --engine A --engine B. Switches that mean
// nothing to kvasir proxy are dropped.
func Args(args []string) []string {
	at := 0
	for at < len(args) && strings.HasPrefix(args[at], "--log-") {
		if at++; !strings.Contains(args[at-1], "=") {
			at++ // skips the value of the flag
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
			// These switches are dropped: --prefill implies P and D, and the proxy always chooses a rank if an engine has several.
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
				out = append(out, "--engine") // --worker-urls has no value: the parser reports it
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

// isRegistryPort reports whether a word can stand after a URL for the registry: a port, or none.
func isRegistryPort(word string) bool {
	return word == "none" || word != "" && strings.Trim(word, "0123456789") == ""
}
