// SPDX-License-Identifier: Apache-2.0

package bootstrap

import (
	"strings"
	"testing"
)

// A D or P of SGLang that asks vLLM's registry gets an error: a P of SGLang is its own bootstrap server.
func TestRegistryIsNotSGLangs(t *testing.T) {
	r := open(t, Options{})
	for _, q := range []string{"GET /route?prefill_dp_rank=-1", "PUT /route", "POST /register_dp_rank", "POST /query_dp_ranks"} {
		method, path, _ := strings.Cut(q, " ")
		if code, text := call(r, method, path, ""); code != 404 || !strings.Contains(text, "A P of SGLang is its own bootstrap server") {
			t.Errorf("%s: %d %s", q, code, text)
		}
	}
}
