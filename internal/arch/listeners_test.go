// SPDX-License-Identifier: Apache-2.0

package arch

import (
	"go/ast"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// securityPage has a row for each listener.
const securityPage = root + "/docs/operate/security.md"

// attacksPage has a row for each class of attacks.
const attacksPage = root + "/docs/operate/attacks.md"

// opened says which rows of the page are about the sockets that a file opens. If a file that opens a socket is not here, add a row to
// the page that says what defends the listener.
var opened = map[string][]string{
	"cmd/kvasir/internal/cli/server.go":        {"`kvasir server`: `http`"},
	"cmd/kvasir/internal/cli/bootstrap.go":     {"`kvasir bootstrap`: `http`"},
	"cmd/kvasir/internal/cli/relay.go":         {"`kvasir relay`: `http`"},
	"cmd/kvasir/internal/cli/proxy.go":         {"`kvasir proxy`: `api`", "`kvasir proxy`: `admin`"},
	"cmd/kvasir/internal/cli/engine.go":        {"`kvasir engine`: `http`"},
	"cmd/kvasir/internal/cli/engine_sglang.go": {"`kvasir engine`: `transfer`"},
	"cmd/kvasir/internal/cli/engine_events.go": {"`kvasir engine`: `events`"},
	"cmd/kvasir/internal/cli/store_node.go":    {"`kvasir store-node`: `http`"},
	"cmd/kvasir/internal/cli/keeper.go":        {"`kvasir keeper`: `http`"},
	"server/server.go":                         {"`kvasir server`: `zmq`", "`kvasir server`: `--ipc`"},
	"server/offload/offload.go":                {"`kvasir server`: `--vllm-tier`"},
	"server/events/publisher.go":               {"`kvasir server`: `events`", "`kvasir keeper`: `events`"},
	"mooncake/relay/relay.go":                  {"`kvasir relay`: `transfer`"},
	"mooncake/relay/engine.go":                 {"`kvasir relay`: `transfer`"},
	"mooncake/sender.go":                       {"`kvasir engine`: `transfer`"},
	"mooncake/transfer/target.go":              {"`kvasir store-node`: `transfer`", "`kvasir transfer serve`: `transfer`", "`kvasir relay`: `transfer`", "`kvasir engine`: `transfer`"},
	"mooncake/transfer/bench/serve.go":         {"`kvasir transfer serve`: `transfer`"},
	"mooncake/transfer/bench/bench.go":         {"`kvasir demo`, `kvasir transfer bench`"},
	"sim/engine/mooncake.go":                   {"`kvasir engine`: `transfer`"},
	"sim/demo/demo.go":                         {"`kvasir demo`, `kvasir transfer bench`"},
	"cmd/kvasir/internal/doctor/network.go":    {"`kvasir doctor`"},
	"tier/keeper/control.go":                   {"`kvasir keeper`: control socket"},
	"zmtp/endpoint.go":                         nil, // the sockets of the files that make a Router or a Pub
	"zmtp/pub.go":                              nil, // a Pub is a Router
	"internal/takeover/listen.go":              nil, // the sockets of the files that call ListenTCP
}

// opens reports whether a call makes a listening socket: a Listen of package net, takeover, transfer or of a ListenConfig, or a Router or Pub
// of zmtp.
func opens(call *ast.CallExpr) bool {
	name, of := "", ""
	switch f := call.Fun.(type) {
	case *ast.Ident:
		name = f.Name
	case *ast.SelectorExpr:
		name = f.Sel.Name
		if x, ok := f.X.(*ast.Ident); ok {
			of = x.Name
		}
	}
	switch {
	case strings.HasPrefix(name, "Listen") && slices.Contains([]string{"net", "takeover", "transfer", "tls", "http"}, of):
		return name != "ListenAgain"
	case name == "ListenAndServe", name == "ListenAndServeTLS":
		return true
	case name == "Listen" && len(call.Args) == 3: // of a net.ListenConfig: ctx, network, address
		network, ok := call.Args[1].(*ast.BasicLit)
		return ok || isIdent(call.Args[1], "network") && network == nil
	}
	return (name == "NewRouter" || name == "NewPub") && (of == "zmtp" || of == "")
}

func isIdent(e ast.Expr, name string) bool {
	i, ok := e.(*ast.Ident)
	return ok && i.Name == name
}

// Each socket that the binary opens has a row on the page about security, and each row is about a socket.
func TestEveryListenerIsDefended(t *testing.T) {
	text, err := os.ReadFile(securityPage)
	if err != nil {
		t.Fatal(err)
	}
	_, table, found := strings.Cut(string(text), "\n## Listeners\n")
	if !found {
		t.Fatal("the page has no chapter Listeners")
	}
	table, _, _ = strings.Cut(table, "\n## ")
	rows := map[string]bool{} // first cell: whether a file opens it
	for l := range strings.Lines(table) {
		if cells := strings.Split(l, "|"); len(cells) > 3 && strings.Contains(cells[1], "`") {
			rows[strings.TrimSpace(cells[1])] = false
			if strings.TrimSpace(cells[2]) == "" {
				t.Errorf("nothing defends %s", cells[1])
			}
		}
	}
	files := map[string]bool{}
	for folder, p := range read(t) {
		if r := room(folder); r == "interop" || r == "docs" || strings.HasPrefix(folder, "internal/testkit") || strings.HasPrefix(folder, "internal/tools") || p.importsTesting() || strings.HasSuffix(folder, "test") {
			continue
		}
		for _, f := range p.files {
			ast.Inspect(f.tree, func(n ast.Node) bool {
				if call, ok := n.(*ast.CallExpr); ok && opens(call) {
					files[f.path] = true
				}
				return true
			})
		}
	}
	for f := range files {
		names, listed := opened[f]
		if !listed {
			t.Errorf("%s opens a socket: say in %s what defends it, and name its row in the table opened", f, filepath.Base(securityPage))
		}
		for _, name := range names {
			hit := false
			for row := range rows {
				if row == name || strings.HasPrefix(row, name+" (") {
					rows[row], hit = true, true
				}
			}
			if !hit {
				t.Errorf("%s opens %s, which has no row", f, name)
			}
		}
	}
	for f := range opened {
		if !files[f] {
			t.Errorf("%s opens no socket: take it out of the table opened", f)
		}
	}
	for row, used := range rows {
		if !used {
			t.Errorf("no file opens %s: take the row out", row)
		}
	}
}

// Each row of the attacks in attacks.md names tests that exist for both configurations.
func TestAttacksHaveTests(t *testing.T) {
	text, err := os.ReadFile(attacksPage)
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(text), "## Attacks")
	packages := read(t)
	rows := 0
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if !strings.HasPrefix(line, "|") || strings.HasPrefix(line, "| ---") || strings.HasPrefix(line, "| attack |") {
			continue
		}
		rows++
		if len(cells) != 3 {
			t.Errorf("%q has %d cells", cells[0], len(cells))
			continue
		}
		for _, c := range cells[1:] {
			if missing, named := missingTests(packages, c); len(missing) > 0 || named == 0 {
				t.Errorf("%q: %q names %d tests; missing: %v", cells[0], c, named, missing)
			}
		}
	}
	if rows < 13 {
		t.Errorf("only %d attacks found: the reader of the page is broken", rows)
	}
}
