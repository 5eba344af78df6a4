// SPDX-License-Identifier: Apache-2.0

package admin_test

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/kvasir-kv/kvasir/internal/transferlog"
	"github.com/kvasir-kv/kvasir/mooncake/bootstrap"
	"github.com/kvasir-kv/kvasir/server/admin"
)

// GET /transfers has each transfer once, whoever saw it, with ids cut short and peers' texts as JSON escapes
// them; a web page of another site gets nothing. Where nothing runs beside the server the lists are empty.
func TestTransfers(t *testing.T) {
	get := func(parts *admin.Parts) (got admin.Transfers, text string) {
		t.Helper()
		code, text := ask(admin.Handler(newServer(t), admin.Options{Parts: parts}), "GET", "http://localhost/transfers", "")
		if code != 200 || json.Unmarshal([]byte(text), &got) != nil {
			t.Fatalf("%d %s", code, text)
		}
		return got, text
	}
	if got, text := get(nil); got.Seen == nil || got.Last == nil || len(got.Seen)+len(got.Last) > 0 || got.Engines != nil {
		t.Errorf("alone: %s", text)
	}
	parts := new(admin.Parts)
	parts.AddEngines(func() []bootstrap.EngineState { return []bootstrap.EngineState{{ID: "p</script>", Workers: 1}} })
	if got, text := get(parts); len(got.Seen) > 0 || len(got.Engines) != 1 || got.Engines[0].ID != "p</script>" {
		t.Errorf("with a registry: %s", text)
	}
	var relay, proxy transferlog.Log
	const id = "kvasir-0123456789abcdef0123456789abcdef"
	proxy.Begin(transferlog.Transfer{ID: id, Request: "chat-1", Model: "m"}, transferlog.Computing, "P computes")
	relay.Begin(transferlog.Transfer{ID: id, Request: "cmpl-1", From: "p</script><b>"}, transferlog.Computing, "waits for P")
	for range 100 {
		relay.Begin(transferlog.Transfer{ID: "x"}, transferlog.Computing, "").End(transferlog.Failed, strings.Repeat("\x00", 1000))
	}
	parts.AddTransfers("proxy", proxy.Last)
	parts.AddTransfers("relay", relay.Last)
	got, text := get(parts)
	if strings.Join(got.Seen, " ") != "proxy relay" || len(got.Last) != transferlog.Max || len(text) > 160<<10 {
		t.Errorf("%v, %d transfers, %d bytes", got.Seen, len(got.Last), len(text))
	}
	last := got.Last[len(got.Last)-1]
	if last.ID != "kvasir-01234567…" || last.Request != "chat-1" || last.Model != "m" || last.From != "p</script><b>" || !last.State.Running() {
		t.Errorf("%+v", last)
	}
	if strings.Contains(text, "<") || strings.Contains(text, "89abcdef0123456789") {
		t.Errorf("%s", text)
	}
	h := admin.Handler(newServer(t), admin.Options{Parts: parts})
	if code, _ := ask(h, "GET", "http://evil.example/transfers", ""); code != 403 {
		t.Errorf("a foreign name: %d", code)
	}
	var now admin.Live
	if _, text := ask(h, "GET", "http://localhost/now", ""); json.Unmarshal([]byte(text), &now) != nil || len(now.PD.Last) != transferlog.Max {
		t.Errorf("/now has %d transfers", len(now.PD.Last))
	}
}
