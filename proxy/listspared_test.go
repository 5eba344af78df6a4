// SPDX-License-Identifier: Apache-2.0

package proxy_test

import (
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/testkit"
)

// listOf returns one request with the prompts of several requests.
func listOf(more string, requests ...string) string {
	var list []string
	for _, r := range requests {
		var q struct{ Prompt string }
		_ = json.Unmarshal([]byte(r), &q) // one of this package
		list = append(list, q.Prompt)
	}
	text, _ := json.Marshal(list)
	return fmt.Sprintf(`{"prompt":%s,"max_tokens":4%s}`, text, more)
}

// wantListAsked is wantAsked for a list of prompts.
func (x *deployment) wantListAsked(what string, want int64, request string, alone *served) {
	x.t.Helper()
	_, whole, _ := post(x.t, alone.web.URL, request)
	before := x.p[0].Stats().Finished
	status, got, _ := post(x.t, x.url, request)
	if status != 200 || !slices.Equal(choicesOf(x.t, got).Texts, choicesOf(x.t, whole).Texts) {
		x.t.Fatalf("%s: %d %s\nwant %s", what, status, got, whole)
	}
	x.idle()
	if n := x.p[0].Stats().Finished - before; n != want {
		x.t.Errorf("%s: P was asked %d times, want %d", what, n, want)
	}
}

// P does not compute a prompt of a list that a relay or a cache server has from an earlier request or list, whole or streamed.
func TestListsAreSparedP(t *testing.T) {
	const stream = `,"stream":true,"stream_options":{"include_usage":true}`
	play := func(x *deployment, alone *served, prompt func(int) string) {
		for _, e := range append(x.p, x.d...) {
			testkit.Eventually(t, "all are well", func() bool { return x.proxy.Stats().Well[e.web.URL] == 1 })
		}
		x.only(0)
		x.wantAsked("one prompt", 1, prompt(1), alone)
		x.wantListAsked("a list with that prompt and two others, at one D", 2, listOf("", prompt(1), prompt(2), prompt(3)), alone)
		x.only(1)
		x.wantListAsked("the list at another D", 0, listOf("", prompt(1), prompt(2), prompt(3)), alone)
		x.only(2)
		x.wantListAsked("in another order, streamed", 1, listOf(stream, prompt(3), prompt(4), prompt(1)), alone)
		x.wantAsked("a prompt of a list alone", 0, prompt(4), alone)
		if s := x.proxy.Stats(); s.Requests["ok"] != 5 || s.Retries != 0 || x.proxy.Taken() != "" {
			t.Errorf("%+v", s)
		}
	}
	t.Run("relay", func(t *testing.T) {
		x, _, alone := startRelayed(t)
		play(x, alone, func(i int) string { return body(i, 4, "") })
		if s := x.proxy.Stats(); s.Spared["relay"] != 7 {
			t.Errorf("%+v", s)
		}
	})
	t.Run("store", func(t *testing.T) {
		_, x, o, alone := startShared(t, 3, nil)
		x.start(o)
		testkit.Eventually(t, "the proxy sees the server", func() bool { return x.proxy.Stats().Store == 1 })
		play(x, alone, func(i int) string { return talk(i, 3) })
		if s := x.proxy.Stats(); s.Spared["store"] < 3 || s.Spared["store"]+s.Spared["decode"] != 7 { // D's own prefix cache has some
			t.Errorf("%+v", s)
		}
	})
}
