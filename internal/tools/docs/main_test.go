// SPDX-License-Identifier: Apache-2.0

package main

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// tree writes files into a folder and scans it.
func tree(t *testing.T, files map[string]string) *code {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		name = filepath.Join(root, name)
		if err := os.MkdirAll(filepath.Dir(name), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(name, []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	c, err := scan(root)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// The tool finds every form in which code registers routes, and also metrics and variables.
func TestScanFindsRoutesMetricsAndVariables(t *testing.T) {
	c := tree(t, map[string]string{"proxy/a.go": `package a
type Stats struct {
	A uint64 ` + "`counter:\"a_total\" label:\"x,y\" help:\"As.\"`" + `
	B float64 ` + "`gauge:\"b\" always:\"t=ram\" help:\"B|C.\"`" + `
}
var routes = map[string]int{"/table": 1}
func f() {
	mux.Handle("GET /handled", h)
	handle("POST /helper", f)
	post("/posted", f)
	for p, f := range map[string]int{"PUT /looped/{id}": 1} { mux.Handle(p, f) }
	switch path := r.URL.Path; path { case "/switched": }
	switch { case path == "/compared" && r.Method == http.MethodDelete: }
	switch u.Path { case "/another": }
	open("/file", 1)
	os.Getenv("KVASIR_X"); get("AWS_Y", "Not_This")
}`, "proxy/a_test.go": `package a
func g() { os.Getenv("KVASIR_TEST"); mux.Handle("GET /test", h) }`})
	var routes []string
	for _, r := range c.routes {
		routes = append(routes, strings.TrimSpace(r.method+" "+r.path))
	}
	slices.Sort(routes)
	if want := []string{"/switched", "/table", "DELETE /compared", "GET /handled", "POST /helper", "POST /posted", "PUT /looped/{id}"}; !slices.Equal(routes, want) {
		t.Errorf("routes %q, want %q", routes, want)
	}
	if want := []string{"AWS_Y", "KVASIR_X"}; !slices.Equal(c.variables, want) {
		t.Errorf("variables %q, want %q", c.variables, want)
	}
	page := metricsOf("proxy", c)
	for _, row := range []string{"| `a_total` (counter) | x, y | As. |", `| t=ram | B\|C. |`} {
		if !strings.Contains(page, row) {
			t.Errorf("%s lacks %s", page, row)
		}
	}
}

// Each kind of gap is a fault, and a complete page has none.
func TestReferenceNamesWhatIsMissing(t *testing.T) {
	c := &code{
		metrics:   []metric{{name: "kvasir_m", file: "proxy/x.go", kind: "gauge"}, {name: "kvasir_n", file: "nowhere/x.go", help: "N."}},
		routes:    []route{{"GET", "/here", "proxy/x.go"}, {"GET", "/there", "proxy/x.go"}, {"GET", "/other", "nowhere/x.go"}},
		variables: []string{"KVASIR_A", "KVASIR_B"},
	}
	hand := map[string]string{"docs/operate/proxy-routes.md": "`/here`, `/there/more`, `/hereafter`", environment: "| `KVASIR_A` | x |\n| `KVASIR_GONE` | x |\n"}
	_, faults := reference(map[string]string{"proxy.md": "# kvasir proxy\n", "README.md": "# Commands of `kvasir`\n"}, c, hand)
	want := []string{
		environment + " has a row of KVASIR_GONE, which no code reads", environment + " has no row of KVASIR_B",
		"no page in docs names the route /there of kvasir proxy",
		"nowhere/x.go: no command in the table servedBy has the metric kvasir_n", "nowhere/x.go: no command in the table servedBy has the route /other",
		"proxy/x.go: the metric kvasir_m has no help",
	}
	if !slices.Equal(faults, want) {
		t.Errorf("%q", faults)
	}
	hand["docs/operate/proxy-routes.md"] = "`/hereafter`, `/there`"
	if _, faults := reference(map[string]string{"proxy.md": ""}, c, hand); !slices.Contains(faults, "no page in docs names the route /here of kvasir proxy") {
		t.Errorf("%q", faults)
	}
}

func TestUntestedCommands(t *testing.T) {
	commands := leaves(map[string]string{"README.md": "# kvasir x\n", "top.md": "# kvasir top\n", "tier.md": "# kvasir tier\n## kvasir tier ls\n## kvasir tier rm\n## kvasir tier cp\n"})
	if want := []string{"tier cp", "tier ls", "tier rm", "top"}; !slices.Equal(commands, want) {
		t.Fatalf("%q", commands)
	}
	files := [][][]string{{{"top", "--help"}, {"tier", "ls", "fs:x"}}, {{"tier"}, {"want", "rm", "fs:x"}}, {{"cp", "x"}}}
	if got, want := untested(commands, files), []string{"tier cp", "top"}; !slices.Equal(got, want) {
		t.Errorf("%q, want %q", got, want)
	}
}

// Blocks that a reader should not type are listed with their reason. A block without a language and a mark without a block are faults.
func TestBlocks(t *testing.T) {
	var list strings.Builder
	faults := blocks(map[string]string{
		"a.md": "<!-- not typed: needs root -->\n```sh\nsudo x\nsudo y\n```\n```sh\nls\n```\n",
		"b.md": "```\nkvasir server\n```\n<!-- soon -->\n",
	}, &list)
	if len(faults) != 2 || !strings.HasPrefix(faults[0], "b.md: line 1: ") || !strings.HasPrefix(faults[1], "b.md: line 4: ") {
		t.Errorf("%q", faults)
	}
	if want := "a.md:2: not typed (needs root): sudo x\n1 of 2 shell blocks are typed\n"; list.String() != want {
		t.Errorf("%q, want %q", list.String(), want)
	}
}

// The tool finds a changed page, a missing page and a superfluous page.
func TestStalePages(t *testing.T) {
	t.Chdir(t.TempDir())
	pages := map[string]string{"a.md": "a", "b.md": "b"}
	if err := write(pages); err != nil {
		t.Fatal(err)
	}
	if faults := stale(pages); faults != nil {
		t.Errorf("%q", faults)
	}
	if err := os.WriteFile(filepath.Join(out, "more.md"), nil, 0o644); err != nil {
		t.Fatal(err)
	}
	pages["a.md"], pages["c.md"] = "other", "c"
	if faults := stale(pages); len(faults) != 3 {
		t.Errorf("%q", faults)
	}
}
